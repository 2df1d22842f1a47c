"""Debate: scores by hand, what the judge reads and how sure it is, the update against autograd of the paper's loss."""
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_dpo import assert_learns, log_likelihoods, logits_of, random_play, writing
from torch.nn.functional import logsigmoid

from dev.experiments import debate_slope
from nanochat import recipes
from nanochat.common import BadInput
from nanochat.recipes.self_play import _debates as debates
from nanochat.recipes.self_play._debates import Position, are_reached, debate_scores, positions_of, quoted, won
from nanochat.rl.play.pairs import pair_coefficients, pair_losses
from nanochat.rl.verify.comparing import choice_chances
from tasks.formats import COMPACT, PAPER

debate = recipes.load("debate")
U = torch.tensor([-800.0, -2.0, 0.0, 0.7, 800.0], dtype=torch.float64)


def coefficients(u: torch.Tensor, target: float) -> torch.Tensor:
    """Those of the chosen of each pair, with beta 0.5."""
    Q = len(u)
    return pair_coefficients(u, torch.ones(Q), list(range(Q)), list(range(Q, 2 * Q)), 2 * Q, 0.5,
                             torch.full_like(u, target))[:Q]


def test_a_pair_is_drawn_to_where_its_margin_says_what_the_target_does():
    assert torch.equal(pair_losses(U, torch.ones_like(U)), -logsigmoid(U))         # with a target of 1 it is DPO
    assert torch.equal(coefficients(U, 1.0), 0.5 * torch.sigmoid(-U))
    assert coefficients(torch.zeros(1), 0.5).item() == 0                           # a draw, at the reference
    assert coefficients(torch.tensor([math.log(3.0)]), 0.75).item() == pytest.approx(0, abs=1e-7)  # sigma(log 3) = 3/4
    assert coefficients(torch.zeros(1), 0.75).item() == pytest.approx(0.5 * 0.25)  # beta (P - sigma(0))
    assert torch.allclose(coefficients(U, 0.3), -coefficients(-U, 0.7))            # the pair the other way round
    assert pair_losses(torch.zeros(1), torch.tensor([0.3])).item() == pytest.approx(math.log(2))


def test_the_scores_of_two_questions_by_hand():
    assert [won(c) for c in (0.0, 0.49, 0.5 + 1e-7, 0.51, 1.0)] == [0, 0, 0.5, 1, 1]
    # confidence in the right answer: two copies, start argues wrong, start argues right, consultant right, then wrong
    rows = [[0.9, 0.8, 0.7, 0.6, 0.3, 1.0, 0.0],   # rounds 0.8 and 1 - 0.7: 0.55 on average, won. Both together 0.45
            [0.5, 0.2, 0.2, 0.9, 0.2, 0.5, 0.25]]  # undecided. 0.2 and 0.8: exactly even. Both together 0.55
    assert debate_scores(rows) == pytest.approx({
        "gen/judge_accuracy": 0.75, "gen/win_rate_against_start": 0.75,
        "gen/single_accuracy": 0.5,          # each believes the consultant, who is right in one of two roles
        "gen/ensembled_accuracy": 0.5, "gen/consultant_win_rate": 1.0, "gen/assigned": 0.75, "gen/unread": 0.125})
    assert set(debate_scores([]).values()) == {None}
    for c in (0.0, 0.1, 0.3, 1.0):  # the same two arguments in both rounds, but for rounding
        assert debate_scores([[c, c, c + 1e-7, c, c, 1.0, 0.0]])["gen/win_rate_against_start"] == 0.5


def test_the_slope_lets_each_seed_have_its_own_level():
    line = lambda level, rise, *skills: [(x, level + rise * x) for x in skills]
    same = [line(0.1, 0.4, 0.5, 0.6, 0.8), line(0.5, 0.4, 0.5, 0.9)]
    assert debate_slope.slope(same) == pytest.approx(0.4)
    assert debate_slope.half_width(same) == pytest.approx(0, abs=1e-9)
    # Slopes 1 and 0; squares 0.02 and 0.08 (skills 0.2 and 0.4 apart), so 0.02 / 0.1
    mixed = [line(0.0, 1.0, 0.5, 0.7), line(0.5, 0.0, 0.5, 0.9)]
    assert debate_slope.slope(mixed) == pytest.approx(0.2)
    # Pseudo-values 2 * 0.2 - 0 and 2 * 0.2 - 1: mean -0.1, deviation sqrt(0.5), t of one degree 12.706
    assert debate_slope.half_width(mixed) == pytest.approx(12.706 * 0.5 ** 0.5 / 2 ** 0.5, rel=1e-3)


def test_without_a_change_of_skill_there_is_no_slope():
    flat = [(0.5, 0.1), (0.5, 0.9)]
    assert debate_slope.slope([flat]) is None and debate_slope.slope([flat, [(0.4, 0.2)]]) is None
    assert debate_slope.half_width([flat, [(0.1, 0.1), (0.2, 0.2)]]) is None  # of one seed there is no interval
    assert debate_slope.slope([]) is None


def test_the_slopes_of_a_csv_are_printed_for_what_it_has(tmp_path, capsys):
    rows = [(seed, tokens, metric, value) for seed in (1, 2) for tokens, skill, accuracy in
            ((0, 0.5, 0.6), (9, 0.7, 0.7 + seed / 50)) for metric, value in
            (("gen/win_rate_against_start_in", skill), ("gen/judge_accuracy_in", accuracy))]
    path = tmp_path / "chain.csv"
    path.write_text("task,arm,seed,step,sampled_tokens,metric,value\n"
                    + "".join(f"t,debate,{seed},{tokens},{tokens},{metric},{value}\n"
                              for seed, tokens, metric, value in rows))
    debate_slope.main(SimpleNamespace(curves=str(path)))
    head, line = capsys.readouterr().out.splitlines()
    # Slopes 0.12 / 0.2 and 0.14 / 0.2: 0.65 on average, 0.05 from it either way, so 12.706 * 0.0707 / sqrt(2)
    assert line.split()[:2] == ["debate", "debate"] and "+0.65 ± 0.64" in line and "2 seeds" in line
    path.write_text("arm,seed\n1,x\n")
    with pytest.raises(BadInput, match="chain.csv"):
        debate_slope.main(SimpleNamespace(curves=str(path)))


def test_the_judge_sees_steps_and_the_assigned_answer(base):
    t = random_play("debate")
    assert quoted(t, "1+2:0;0*1:2;=2", "1") == "1+2:0;0*1:2;=1"
    assert quoted(t, "1+2:0;0*1", "1") == "1+2:0;=1" and quoted(t, "", "1") == "=1"


def chance_of_a(t, prompt: list[int], before: str) -> float:
    """That the judge chooses A, by a plain forward, after what it writes before."""
    logits = logits_of(t.roles["verifier"].model, prompt, t.tokenizer.encode(f"{before}A"))[-1]
    return torch.sigmoid(logits[ord("A")] - logits[ord("B")]).item()


def test_the_confidence_is_that_of_the_token_of_the_written_choice(base):
    t = random_play("debate")
    texts = ["1+2:0T;=A", "=B", "A;B;=A;=B", "T;F;", "=A2", "=A "]
    prompts = t.solve_prompts([t.task.problem("rl", 0)] * len(texts))
    chances = choice_chances(t, "verifier", t.written("verifier", prompts, texts))
    assert chances == [None if before is None else pytest.approx(chance_of_a(t, prompts[0].ids, before), rel=1e-5)
                       for before in ("1+2:0T;=", "=", "A;B;=A;=", None, None, "=")]


def played(protocol: str, arguments: list[str], verifications: list[str], recipe: str = "debate"):
    """A question with the answers 1 and 2 whose arguments, and the verifications in their order, are these texts.
    -> (the step, its updates, what the judge was asked)"""
    t = random_play(recipe, "--examples-per-step", "1", "--num-samples", "2", "--protocol", protocol)
    problem_of = t.task.problem
    t.task.problem = lambda split, index: replace(problem_of(split, index), answer="1")
    t.task.check = lambda problem, text: t.task.fmt.answer(text) == problem.answer
    writing(t, {"distractors": ["=2", "=1", "=0", "=2"], "arguments": arguments, "verdicts": verifications})
    updates = list(recipes.load(recipe).play(t))
    return t, updates, [t.tokenizer.decode(p.ids[2:-2]).split("|", 1)[1] for p in t.asked["verdicts"]]


ARGUMENTS = ["0+1:1;=1", "0+0:1;=1", "0+1:2;=2", "0+2:2;=0"]  # two for each answer, of which the last one fails
IN_ORDER = ["0+1:1;=1|0+1:2;=2|A", "0+0:1;=1|0+1:2;=2|A", "0+1:2;=2|0+1:1;=1|A", "0+2:2;=2|0+1:1;=1|A"]
ALONE = ["0+1:1;=1|=2|A", "0+0:1;=1|=2|A", "0+1:2;=2|=1|A", "0+2:2;=2|=1|A"]


@pytest.mark.parametrize("protocol, shown, gamma", [("debate", IN_ORDER, 7.0), ("consultancy", ALONE, 10.0)])
def test_a_step_takes_the_gradient_of_the_papers_loss(base, protocol, shown, gamma):
    """Questions, what the judge reads in both orders, rewards, pairs and the update."""
    t, (update,), asked = played(protocol, ARGUMENTS, ["=A"] * 4 + ["=A", "=B", "no", "=A"])
    assert asked[:4] == shown
    assert asked[4:] == ["|".join([text.split("|")[1], text.split("|")[0], "A"]) for text in shown]
    (rollouts, _), = update.parts
    columns = rollouts.columns
    assert t.metrics["gen/unread"] == 1 / 8 and t.metrics["gen/assigned"] == 3 / 4
    # the judge's confidences again, from plain forwards
    sums = [0.0] * 4
    for i, text in enumerate(asked):
        prompt = t.tokenizer.render_prompt(f"{t.task.problem('rl', 0).prompt}|{text}")
        chance = 0.5 if i == 6 else chance_of_a(t, prompt, "=")
        sums[i % 4] += (chance if i < 4 else 1 - chance) / 2
    rewards = {n: round(reward, 4) for n, reward in enumerate(sums)}
    pairs = [sorted(rows, key=rewards.get, reverse=True) for rows in ((0, 1), (2, 3))]
    texts = [ARGUMENTS[n] for column in zip(*pairs, strict=True) for n in column]
    assert rollouts.texts == texts and columns["assigned"] == [text != ARGUMENTS[3] for text in texts]
    assert columns["reward"] == pytest.approx([rewards[ARGUMENTS.index(text)] for text in texts], rel=1e-5)
    policy, opponent = t.roles["generator"].model, t.roles["opponent"].model
    pi, ref = log_likelihoods(policy, rollouts), log_likelihoods(opponent, rollouts)
    loss = 0
    for q, (w, l) in enumerate(pairs):
        u = 0.5 * ((pi[q] - ref[q]) - (pi[2 + q] - ref[2 + q]))
        P = 1 / (1 + math.exp(-gamma * (rewards[w] - rewards[l])))
        loss += (-P * logsigmoid(u) - (1 - P) * logsigmoid(-u) - 0.005 * pi[q]) / 2
    assert_learns(t, update, loss, 1e-4)


def test_a_judge_that_learns_is_paid_for_the_side_with_the_right_answer(base):
    """Of each debate two verifications in each order. Sides 1 1 2 2 stand first, then second; 1 is right."""
    said = ["=A", "=B", "=A", "no", "=B", "=A", "=B", "=B"] + ["=A", "=B", "=B", "=B", "=A", "=A", "=A", "no"]
    t, updates, _ = played("debate", ARGUMENTS, said, recipe="debate_judge")
    assert [update.role for update in updates] == ["generator", "verifier"]
    (verdicts, advantages), = updates[1].parts
    rewards = [1, 0, 1, 0, 1, 0, 1, 1] + [0, 1, 1, 1, 1, 1, 1, 0]
    assert verdicts.columns["reward"] == rewards and t.metrics["ver/parse_fail"] == 2 / 16
    alike = [a == b for a, b in zip(rewards[::2], rewards[1::2], strict=True) for _ in range(2)]
    signs = [0 if same else 2 * reward - 1 for same, reward in zip(alike, rewards, strict=True)]
    assert advantages[:, 0].sign().tolist() == signs
    assert played("debate", ARGUMENTS, ["no"] * 16, recipe="debate_judge")[1] == []


def test_equal_arguments_are_no_pair_although_their_confidences_differ_in_the_last_bit(base, monkeypatch):
    """As they do where verifications are packed with others."""
    noisy = lambda t, role, verifications: [0.3 + 1e-8 * n for n in range(len(verifications))]
    monkeypatch.setattr(debates, "choice_chances", noisy)
    t, updates, _ = played("debate", ["=1", "=1", "=2", "=2"], ["=A"] * 8)
    assert updates == [] and t.metrics["gen/num_pairs"] == 0 and t.metrics["gen/frac_reward_zero_std"] == 1


def test_without_a_readable_choice_nothing_is_learned(base):
    t, updates, _ = played("debate", ARGUMENTS, ["no"] * 8)
    assert updates == [] and t.metrics["gen/unread"] == 1 and t.metrics["gen/judge_accuracy"] == 0.5
    assert t.metrics["gen/num_pairs"] == 0 and t.metrics["gen/preference"] is None


def test_an_argument_for_the_right_answer_comes_to_it_in_any_form_that_is_right(base):
    t = random_play("debate")
    t.task.check = lambda problem, text: {"=1": True, "=4": True, "=9": None}.get(text, False)
    sides = Position(t.task.problem("rl", 0), "1", "2", True), Position(t.task.problem("rl", 0), "2", "1", False)
    texts = ["=1", "=4", "=2", "=9", "no"]
    assert are_reached(t, texts, [sides[0]] * 5) == [True, True, False, False, False]
    assert are_reached(t, texts, [sides[1]] * 5) == [False, False, True, False, False]


@pytest.mark.parametrize("calculator", [True, False])
def test_arguments_may_call_what_solutions_may(base, calculator):
    asked = ("distractors", "arguments", "held_out", "start", "eval")
    t = writing(random_play("debate"), {draw: ["=2", "=0"] for draw in (*asked, "verdicts")})
    t.sampler.calculator, t.task.check = calculator, lambda problem, text: False
    list(debate.play(t))
    t.evaluating = True
    debate.evaluate(t)
    assert [t.tools[draw] is not None for draw in asked] == [calculator] * 5 and t.tools["verdicts"] is None


def test_a_debater_is_told_to_argue():
    assert COMPACT.argue_prompt.format(problem="1+1", answer="2") == "2|1+1"
    asked = PAPER.argue_prompt.format(problem="1+1", answer="2")
    assert "Argue that the answer is 2" in asked and "<answer>\\boxed{...}</answer>" in asked


def test_the_wrong_answer_is_the_most_frequent_one_and_without_one_there_is_no_debate(base):
    texts = ["=1", "=2", "=0", "=0",  "=1", "=1", "=1", "",  "=2", "=0", "=9", "=9"]  # 9 cannot be scored
    t = writing(random_play("debate", "--num-distractors", "4"), {"distractors": texts})
    t.task.check = lambda problem, text: None if "9" in text else text == "=1"
    one, two, three = problems = [replace(t.task.problem("rl", i), answer="1") for i in range(3)]
    assert positions_of(t, problems, "distractors") == [
        (one, "1", "0", True), (one, "0", "1", False), (three, "1", "2", True), (three, "2", "1", False)]
