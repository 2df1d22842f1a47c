"""AlphaProof's perfect-verifier arm: the window of proofs, what is learned from it, rewards, targets, variants."""
from dataclasses import replace

import pytest
import torch
from test_dpo import assert_learns, keep, log_likelihoods, of_one_and_two_ranks, random_play

from nanochat import recipes
from nanochat.common import BadInput
from nanochat.recipes.self_play.alphaproof import of_targets, proved_of, remembered, shortest
from tasks import make_task
from tasks.common import Problem

alphaproof = recipes.load("alphaproof")
TARGETS = ["--task", "rewrite", "--curriculum", "variants", "--targets-of", "test_out", "--num-targets", "3"]


def test_the_shortest_proof_of_each_theorem():
    best = lambda *rewards: shortest(rewards, [9, 4, 4, 7], [0, 0, 0, 1])
    assert best(1, 1, 0, 0) == best(1, 1, 1, 0) == {0: 1}  # the shorter one; of a tie the first
    assert best(1, 0, 1, 1) == {0: 2, 1: 3}                # of each theorem one
    assert best(1, None, None, None) == {0: 0} and best(0, 0, 0, 0) == best(*[None] * 4) == {}


def test_the_window_keeps_the_shortest_proof_and_the_last_theorems_and_shares_are_of_all():
    window = remembered({}, [["x", "1", "long;=1", 5], ["y", "a", "b;=a", 6]], 2)
    assert window == {"x": ["1", "long;=1", 5], "y": ["a", "b;=a", 6]}
    window = remembered(window, [["x", "1", "longer;=1", 7]], 2)                    # no news
    assert list(window) == ["x", "y"] and window["x"] == ["1", "long;=1", 5]
    window = remembered(window, [["x", "1", "=1", 8], ["z", "1", "c;=1", 9]], 2)    # x is news, so y is the oldest
    assert window == {"x": ["1", "=1", 8], "z": ["1", "c;=1", 9]}
    assert remembered(window, [], 1) == {"z": ["1", "c;=1", 9]} and remembered({}, [], 2) == {}
    rows = [[True, 4], [False, 1], [False, 0], [False, 0]]
    assert proved_of(rows, 4, "{}_in") == {"pass1_in": 1 / 4, "pass_k_in": 2 / 4}
    assert proved_of([], 4, "{}_in") == {"pass1_in": None, "pass_k_in": None}


def play_with(*flags: str, texts: list[str] | None = None, check=None):
    """A step of random models; with texts these are the attempts, at each theorem the same."""
    t = random_play("alphaproof", "--examples-per-step", "2", "--num-samples", "4", *flags)
    t.task.check = check or t.task.check
    if texts:
        def solve(draw, problems, copies=None):
            prompts = [prompt for prompt in t.solve_prompts(problems) for _ in texts]
            return t.written("generator", prompts, texts * len(problems)).with_prompts(prompts)
        t.solve = solve
    return t


def test_expert_iteration_is_the_cross_entropy_of_the_found_proofs(base):
    """Per token over all proofs, and failed attempts teach nothing."""
    t = play_with("--examples-per-step", "4", "--num-samples", "8")
    update, = alphaproof.play(t)
    proofs, model = update.parts[0][0], t.roles["generator"].model
    assert len(proofs) > 1 and len(set(proofs.problems())) == len(proofs) and set(t.check(proofs)) == {True}
    assert_learns(t, update, -torch.stack(log_likelihoods(model, proofs)).sum() / proofs.lengths.sum())


def test_the_shortest_proof_is_that_of_the_fewest_characters(base):
    """As the window has it, also where another one has fewer tokens."""
    t = play_with(texts=["=22", "=2"], check=lambda problem, text: True)
    written = t.written
    t.written = lambda role, prompts, texts: replace(
        written(role, prompts, texts), lengths=torch.tensor([1 + (text == "=2") for text in texts]))
    list(alphaproof.play(t))
    assert [proof for _, proof, _ in t.memory["proofs"].values()] == ["=2", "=2"]


def test_with_one_found_proof_it_alone_is_learned_and_it_is_remembered(base):
    t = play_with(texts=["1+1:2;=2", "=2", "=0", "+"], check=lambda problem, text: text in ("1+1:2;=2", "=2"))
    update, = alphaproof.play(t)
    assert update.parts[0][0].texts == ["=2", "=2"] and t.metrics["gen/proofs_known"] == 2
    assert t.metrics["gen/proved"] == 1 / 2 and t.metrics["gen/theorems_proved"] == 1
    t.state.step, t.done, t.task.check = 1, set(), lambda problem, text: False
    update, = alphaproof.play(t)  # nothing new: the window is learned from
    assert update.parts[0][0].texts == ["=2", "=2"] and t.metrics["gen/theorems_proved"] == 0


def test_where_nothing_was_ever_proved_nothing_is_learned(base):
    for outcome in (False, None):
        t = play_with(check=lambda problem, text, outcome=outcome: outcome)
        assert list(alphaproof.play(t)) == [] and t.metrics["gen/proofs_known"] == 0
        assert t.metrics["gen/unscorable"] == (outcome is None)


def test_an_update_draws_so_many_proofs_of_the_window(base):
    t = play_with("--num-proofs", "3", check=lambda problem, text: False)
    t.memory["proofs"] = {f"{n}+1": ["1", f"={n}", n] for n in range(9)}
    drawn = set()
    for t.state.step in range(4):
        t.done = set()
        update, = alphaproof.play(t)
        proofs = update.parts[0][0]
        assert len(proofs) == 3 and proofs.texts == [f"={problem.prompt[0]}" for problem in proofs.problems()]
        drawn.add(tuple(proofs.texts))
    assert len(drawn) > 1


def test_a_proof_is_labelled_by_the_task_that_its_theorem_came_from(base):
    """A mixture knows that by the problem's index."""
    t = play_with("--task", "mixture", texts=["=2"], check=lambda problem, text: True)
    t.state.step = 3
    theorems = next(alphaproof.play(t)).parts[0][0].problems()
    assert {problem.index % 2 for problem in theorems} == {0, 1}
    assert all(t.task.problem("rl", problem.index).prompt == problem.prompt for problem in theorems)


def test_grpo_learns_from_failures_too(base):
    t = play_with("--learner", "grpo", texts=["=2", "=0", "=0", "+"], check=lambda problem, text: text == "=2")
    (attempts, advantages), = next(alphaproof.play(t)).parts
    # Mean .25, unbiased standard deviation .5: 1.5 and -.5.
    assert len(attempts) == 8
    assert advantages[:, 0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5] * 2, rel=1e-5)
    assert "proofs" not in t.memory


def rewrite_play(*flags: str, texts=None):
    """A step on theorem bbcac:a alone, with its kernel."""
    t = play_with("--task", "rewrite", *flags, texts=texts)
    problem, task = Problem("rl", 0, "bbcac:a", "a"), make_task(t.args)
    t.task.check, t.task.problem = task.check, lambda split, index: replace(problem, split=split, index=index)
    return t


CLAIMS = ["cac;acc;a;=a", "=a", "cac;a;=a", "cac;acc;=a", "b;=b"]  # a proof, three claims without one, another end


def test_the_kernel_rewards_a_proof_and_the_claim_reward_whatever_states_it(base):
    for reward, expected in (("kernel", [1, 0, 0, 0, 0]), ("claim", [1, 1, 1, 1, 0])):
        t = rewrite_play("--reward", reward, "--learner", "grpo", texts=CLAIMS)
        (attempts, _), = next(alphaproof.play(t)).parts
        assert attempts.columns["reward"] == expected * 2
        assert t.metrics["gen/proved"] == 1 / 5 and t.metrics["gen/claimed"] == 4 / 5
        assert t.metrics["gen/claimed_falsely"] == 3 / 5 and t.metrics["gen/proof_steps"] == 3
        assert attempts.columns["claimed"] == [True, True, True, True, False] * 2
        (proofs, _), = next(alphaproof.play(rewrite_play("--reward", reward, texts=CLAIMS))).parts
        assert set(proofs.texts) == {"cac;acc;a;=a" if reward == "kernel" else "=a"}  # the shortest that is rewarded


def at_targets(*flags: str, proved=()):
    t = play_with(*TARGETS, "--examples-per-step", "40", *flags)
    t.memory.update({"targets": [0, 4, 5], "proved": list(proved)})
    return t


def test_a_batch_is_of_variants_and_of_targets_as_often_as_asked(base):
    for share, low, high in (("0", 0, 0), ("1", 40, 40), ("0.5", 10, 30)):
        t = at_targets("--target-share", share)
        targets, (problems, _) = [t.task.problem("test_out", i) for i in (0, 4, 5)], of_targets(t)
        variants = [problem for problem in problems if problem not in targets]
        assert len(problems) == 40 and low <= 40 - len(variants) <= high
        assert not {v.prompt for v in variants} & {target.prompt for target in targets}
        assert len({v.index for v in variants}) == len(variants) and {v.split for v in variants} <= {"variants"}


def test_a_variant_that_is_a_target_is_drawn_again_but_not_for_ever(base):
    t = at_targets("--target-share", "0")
    targets, make = [t.task.problem("test_out", i) for i in (0, 4, 5)], t.task.variants
    t.task.variants = lambda problem, rng: (replace(problem, prompt=targets[1].prompt) if rng.random() < 0.5
                                            else make(problem, rng))
    assert not {problem.prompt for problem in of_targets(t)[0]} & {target.prompt for target in targets}
    t.task.variants = lambda problem, rng: problem
    with pytest.raises(BadInput, match="task rewrite: 1000 variants of .* are targets too; lower --num-targets"):
        of_targets(t)


def test_a_proved_target_is_left_alone_and_so_are_its_variants(base):
    t, varied = at_targets("--target-share", "0.2", proved=[0, 5]), []
    make = t.task.variants
    t.task.variants = lambda problem, rng: varied.append(problem.index) or make(problem, rng)
    assert {problem.index for problem in of_targets(t)[0] if problem.split == "test_out"} == {4} == set(varied)


def test_where_all_targets_are_proved_nothing_is_tried_and_where_there_are_none_it_is_an_error(base):
    t = at_targets(proved=[0, 4, 5])
    assert of_targets(t) == ([], []) and list(alphaproof.play(t)) == []
    assert t.metrics["gen/targets/left"] == 0 and t.told == {"all targets are proved, and nothing more is learned"}
    t.memory["targets"] = []
    with pytest.raises(BadInput, match="--targets-of test_out: .* there is no target"):
        list(alphaproof.play(t))


def test_a_target_that_is_proved_in_training_is_noted_and_a_variant_is_not(base):
    t = at_targets("--target-share", "0.3", "--learner", "grpo")
    t.task.check = lambda problem, text: problem.split == "variants" or problem.index == 4
    list(alphaproof.play(t))
    assert t.memory["proved"] == [4] and t.metrics["gen/targets/left"] == 2 and t.metrics["gen/targets/tried"] > 3


def test_unknown_outcomes_of_an_evaluation_are_counted_over_all_ranks(base, capsys):
    t = play_with()
    t.evaluating, t.task.check, gather = True, lambda problem, text: None, t.gather
    t.gather = lambda rows: gather(rows) * 2  # a second rank with the same
    alphaproof.evaluate(t)
    n = 2 * t.args.eval_examples
    said = capsys.readouterr().out
    assert f"{n} of {n} solutions of test_in" in said and f"{4 * n} of {4 * n} solutions of test_out" in said


def test_the_start_chooses_the_targets_and_they_stay(base):
    t = play_with(*TARGETS)
    t.evaluating, outcomes = True, {index: index % 3 == 0 for index in range(8)}
    t.task.check = lambda problem, text: outcomes[problem.index]
    scores = alphaproof.evaluate(t)
    assert t.memory["targets"] == [1, 2, 4] and scores["gen/targets/num"] == 3  # 5 and 7 are over --num-targets
    assert scores["gen/targets/pass1"] == scores["gen/targets/pass_k"] == 0
    assert scores["gen/pass1_out"] == scores["gen/pass_k_out"] == 3 / 8
    outcomes[2] = True
    scores = alphaproof.evaluate(t)
    assert t.memory["targets"] == [1, 2, 4] and scores["gen/targets/pass1"] == pytest.approx(1 / 3)


def test_draws_of_a_step_follow_from_the_seed_and_the_step(base):
    again, other = of_targets(at_targets()), of_targets(at_targets("--seed", "1"))
    assert of_targets(at_targets()) == again != other
    t = at_targets()
    t.state.step = 1
    assert of_targets(t) != again


def play_share(folder: str) -> None:
    """Two steps on this rank's share of proofs; and what is tried in steps on one and two targets, some of whose places
    are on another rank."""
    t, proved, tried = random_play("alphaproof", "--num-proofs", "5"), [], []
    for t.state.step in (0, 1):
        t.done = set()
        update, = alphaproof.play(t)
        proofs = update.parts[0][0]
        proved.append(sorted(zip([problem.prompt for problem in proofs.problems()], proofs.texts, strict=True)))
    for step, targets in enumerate(([0], [0, 4])):
        other = at_targets("--examples-per-step", "6", "--target-share", "0.8", "--learner", "grpo")
        other.state.step, other.memory["targets"] = step, targets
        update, = alphaproof.play(other)
        attempts = update.parts[0][0]
        tried += [[step, prompt.problem.prompt, prompt.copy, text]
                  for prompt, text in zip(attempts.prompt_of(), attempts.texts, strict=True)]
    keep(t, {"proved": proved, "tried": tried, "memory": t.memory, "metrics": t.metrics}, folder)


def test_two_ranks_do_what_one_does_and_try_a_target_that_both_have_anew_on_each(base, tmp_path):
    one, first, second = of_one_and_two_ranks(play_share, tmp_path)
    assert first["memory"] == second["memory"] == one["memory"] and len(one["memory"]["proofs"]) > 3
    assert [sorted(a + b) for a, b in zip(first["proved"], second["proved"], strict=True)] == one["proved"]
    assert first["metrics"] == pytest.approx(one["metrics"], rel=1e-9)
    assert sorted(first["tried"] + second["tried"]) == sorted(one["tried"])
    assert max(copy for _, _, copy, _ in one["tried"]) > 2
