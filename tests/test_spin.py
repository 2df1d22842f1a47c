"""
SPIN: its update against autograd of the paper's loss in fp64, where nothing is learned, snapshots, a short run.

    python -m pytest tests/test_spin.py -q
"""
import json
import math
from dataclasses import replace

import pytest
import torch
from test_dpo import assert_close, gradient_of, literal_loss, moved_by, parsed, random_play, records, weights_of

from nanochat import recipes
from nanochat.common import BadInput
from nanochat.recipes.self_play.spin import demonstrations, sft_problems
from nanochat.rl.play.pairs import learn_from_pairs
from nanochat.rl.records.rollouts import join
from scripts import tango_rl
from tasks import make_task

G = 3
FLAGS = ["--num-samples", str(G), "--iteration-steps", "2"]
spin = recipes.load("spin")


def in_mid_iteration():
    """A step of which the opponent is another model than the generator."""
    t = random_play("spin", *FLAGS)
    t.steps["generator"] = t.state.step = 1
    return t


def test_the_update_takes_the_gradient_of_the_papers_loss(base):
    """Each demonstration against G samples of the opponent; sampling, joining, scoring and averaging included."""
    t = in_mid_iteration()
    update, = spin.play(t)
    (rollouts, _), = update.parts
    texts = [text for problem in sft_problems(t) for text in demonstrations(t, [problem]).texts]
    P = len(texts)
    assert rollouts.texts[:P] == texts and len(rollouts) == P + P * G
    of = rollouts.problems()
    pairs = [(p, n) for p in range(P) for n in range(P, len(rollouts)) if of[n] == of[p]]
    assert len(pairs) == P * G
    generator, opponent = t.roles["generator"].model, t.roles["opponent"].model
    loss = literal_loss(generator, opponent, rollouts, pairs, 0.1)
    expected = gradient_of(loss, generator)
    assert t.metrics["gen/pair_loss"] == pytest.approx(loss.item(), rel=1e-5) and abs(loss.item() - math.log(2)) > 0.01
    before = weights_of(opponent)
    assert_close(moved_by(t, update), expected, 1e-5)
    assert all(torch.equal(before[name], after) for name, after in weights_of(opponent).items())


def test_each_prompt_is_run_once_for_its_demonstration_and_its_samples(base):
    update, = spin.play(in_mid_iteration())
    (rollouts, _), = update.parts
    P = len(rollouts) // (1 + G)
    assert len(rollouts.prompts) == P and torch.bincount(rollouts.group_id).tolist() == [1 + G] * P


def test_an_iteration_begins_with_the_loss_log_2_against_a_snapshot(base):
    t = random_play("spin", *FLAGS)
    t.steps["generator"] = 2  # the second iteration begins
    update, = spin.play(t)
    opponent, generator = (weights_of(t.roles[name].model) for name in ("opponent", "generator"))
    assert all(torch.equal(opponent[name], generator[name]) for name in generator)
    assert t.metrics["gen/iteration"] == 1 and t.metrics["gen/margin"] == 0
    assert t.metrics["gen/pair_loss"] == pytest.approx(math.log(2), rel=1e-12)
    # P * (1 + G) rollouts for P * G pairs: beta / 2 * (1 + G) / G for each sample, G times that for a demonstration.
    advantages, P = update.parts[0][1], len(update.parts[0][0].prompts)
    assert advantages[P:].unique().tolist() == pytest.approx([-0.05 * (1 + G) / G])
    assert advantages[:P].unique().tolist() == pytest.approx([0.05 * (1 + G)])


def test_in_mid_iteration_the_opponent_stays(base):
    t = in_mid_iteration()
    before = weights_of(t.roles["opponent"].model)
    list(spin.play(t))
    assert all(torch.equal(before[name], after) for name, after in weights_of(t.roles["opponent"].model).items())
    assert t.metrics["gen/iteration"] == 0


def test_where_the_opponent_writes_the_demonstrations_nothing_moves(base):
    t = in_mid_iteration()
    real = demonstrations(t, sft_problems(t))
    rollouts, P = join([real, real]), len(real)
    theirs = t.logprobs("opponent", rollouts)
    update, = learn_from_pairs(t, "generator", rollouts, list(range(P)), list(range(P, 2 * P)), theirs)
    assert t.metrics["gen/frac_equal"] == 1 and t.metrics["gen/pair_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert not any(moved.any() for moved in moved_by(t, update).values())


def test_ranks_share_out_the_problems_of_a_step_and_steps_go_on(base):
    t, dealt = random_play("spin", *FLAGS), []
    for t.state.step in (0, 1):
        whole = sft_problems(t)
        t.run.world = 2
        for t.run.rank in (0, 1):
            assert sft_problems(t) == whole[t.run.rank:: 2]
        t.run.rank, t.run.world = 0, 1
        dealt += whole
    assert [(problem.split, problem.index) for problem in dealt] == [("sft", i) for i in range(8)]


def test_demonstrations_carry_misconceptions_unless_the_task_is_told_otherwise(base):
    shown = {}
    for wrongness in ("0", "1"):
        t = random_play("spin", "--chain-share", "1", "--chain-wrongness", wrongness)
        problems = [t.task.problem("sft", i) for i in range(12)]
        right = make_task(t.args).check
        shown[wrongness] = [right(p, text) for p, text in zip(problems, demonstrations(t, problems).texts, strict=True)]
    assert all(shown["0"]) and not any(shown["1"])


@pytest.mark.parametrize("flags", [["--beta", "-1"], ["--updates-per-batch", "2"], ["--iteration-steps", "0"]])
def test_settings_that_cannot_work_are_refused(flags):
    args = parsed("spin", *flags)
    with pytest.raises(BadInput, match=flags[0]):
        spin.check(args, make_task(args))


def same_weights(a, b) -> bool:
    a, b = (torch.load(path, weights_only=True) for path in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_logs_its_pairs_and_takes_a_snapshot_of_the_generator_every_iteration(base):
    tango_rl.main(parsed("spin", *FLAGS, "--run", "r"))
    log = records(base, "metrics.jsonl")
    names = {"num_pairs", "pair_loss", "pair_accuracy", "margin", "frac_equal", "log_ratio/chosen", "iteration",
             "log_ratio/rejected", "demonstrations_right"}
    for record in log:
        assert {f"gen/{name}" for name in names} | {"opp/reward"} <= record.keys()
        assert record["gen/num_pairs"] == 4 * G and record["gen/skipped"] == 0
    assert [record["gen/iteration"] for record in log] == [0, 0, 1, 1]
    assert [log[i]["gen/pair_loss"] for i in (0, 2)] == pytest.approx([math.log(2)] * 2, rel=1e-12)
    start = base / "chatsft_checkpoints" / "tiny" / "model_000200.pt"
    saved = {(role, step): base / "chatrl_checkpoints" / f"r-{role}" / f"model_{step:06d}.pt"
             for role in ("gen", "opp") for step in range(1, 5)}
    for step, source in {1: start, 2: start, 3: saved["gen", 2], 4: saved["gen", 2]}.items():
        assert same_weights(saved["opp", step], source)
    assert not same_weights(start, saved["gen", 1]) and not same_weights(saved["gen", 2], saved["gen", 4])
    summary = json.loads((base / "runs" / "r" / "summary.json").read_text())
    assert summary["before"]["gen/nll"] > 0 and {"gen/pass1_in", "gen/pass1_out"} <= summary["after"].keys()
    rollouts = records(base, "rollouts.jsonl")
    for rollout in rollouts:
        group = [other for other in rollouts if all(other[key] == rollout[key] for key in ("step", "problem"))]
        assert len(group) == 1 + G  # the demonstration, then the opponent's solutions
        assert min(group[0]["advantages"]) >= 0 >= max(a for other in group[1:] for a in other["advantages"])


def test_problems_that_demonstrations_are_of_must_fit_too(base, monkeypatch):
    """SPIN alone takes its problems from the split of SFT."""
    task = type(make_task(parsed("spin")))
    problem_of = task.problem
    long = lambda problem: replace(problem, prompt="1" + "+1" * 100) if problem.split == "sft" else problem
    monkeypatch.setattr(task, "problem", lambda self, split, index: long(problem_of(self, split, index)))
    with pytest.raises(BadInput, match="the opponent's longest prompt and completion"):
        tango_rl.main(parsed("spin", "--dry-run"))
    tango_rl.main(parsed("grpo", "--dry-run"))
