"""Credit assignment by hand: Tango eq. 4-7, the presets, abstaining rollouts, groups, ranks."""
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings, strategies as st

from nanochat.rl.credit.advantages import COMBINE, PRESETS, SparseRewards, blend, gae, merge, source_advantages, whiten
from nanochat.rl.credit.rewards import CREDIT, step_rewards, terminal_rewards

GROUP = torch.zeros(2, dtype=torch.long)
BOTH = torch.ones(2, 2, dtype=torch.bool)
CENTRED = [name for name, preset in PRESETS.items() if preset.center != "none"]


def inside(lengths: list, T: int) -> torch.Tensor:
    """The mask of rollouts of these lengths. (N, T)"""
    return torch.arange(T) < torch.tensor(lengths, dtype=torch.long)[:, None]


def outcome_advantages(values: list, preset: str, group_id: list | None = None, T: int = 1,
                       lengths: list | None = None) -> torch.Tensor:
    """Advantages (N, T) of one reward per rollout; all rollouts are one group unless group_id says otherwise."""
    lengths = lengths or [T] * len(values)
    rewards = terminal_rewards(values, torch.tensor(lengths, dtype=torch.long))
    groups = torch.tensor(group_id or [0] * len(values), dtype=torch.long)
    return source_advantages(rewards, groups, inside(lengths, T), PRESETS[preset])


def step_advantages(step_ends: list, verdicts: list, preset: str, T: int, group_id: list | None = None,
                    credit: str = "to_go") -> torch.Tensor:
    rewards = step_rewards(step_ends, verdicts, "cpu", credit)
    groups = torch.tensor(group_id or [0] * len(verdicts))
    return source_advantages(rewards, groups, inside([T] * len(verdicts), T), PRESETS[preset])


def assert_rows(advantages, rows):
    torch.testing.assert_close(advantages, torch.tensor(rows, dtype=torch.float32), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preset, expected", [
    ("grpo", [1.5, -0.5, -0.5, -0.5]),              # mean 1/4, unbiased variance (9 + 1 + 1 + 1) / 16 / 3 = 1/4
    ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),        # 1 - 0; 0 - (1 + 0 + 0) / 3
    ("reinforce++", [1.5, -0.5, -0.5, -0.5]),       # of one token each
    ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),       # deviations from the mean 1/4, not divided
    ("reinforce", [1.0, 0.0, 0.0, 0.0])])
def test_presets_of_one_group_by_hand(preset, expected):
    assert_rows(outcome_advantages([1, 0, 0, 0], preset), [[x] for x in expected])


def test_a_reward_reaches_its_rollouts_tokens_tiny_differences_stay_small_and_none_moves_no_baseline():
    assert_rows(outcome_advantages([1, 0], "dr_grpo", T=4, lengths=[3, 1]),
                [[0.5, 0.5, 0.5, 0.0], [-0.5, 0.0, 0.0, 0.0]])
    assert_rows(outcome_advantages([1, 0], "reinforce", T=4, lengths=[3, 1]), [[1.0] * 3 + [0.0], [0.0] * 4])
    # Tokens 1, 1, 1 | 0: mean 3/4, unbiased variance (3 / 16 + 9 / 16) / 3 = 1/4; each token counts, not each rollout.
    assert_rows(outcome_advantages([1, 0], "reinforce++", T=4, lengths=[3, 1]), [[0.5] * 3 + [0.0], [-1.5, 0, 0, 0]])
    # [0, 2e-6]: deviations -1e-6 and 1e-6, divided by sqrt(2) 1e-6 + 1e-6: 0.414214, not 0.707107.
    assert_rows(outcome_advantages([0.0, 2e-6], "grpo"), [[1 - 2 ** 0.5], [2 ** 0.5 - 1]])
    # [1, 0, None]: mean 1/2, std sqrt((1/4 + 1/4) / 1); counted as 0 the None would make the mean 1/3.
    assert_rows(outcome_advantages([1, 0, None], "grpo"), [[0.5 ** 0.5], [-(0.5 ** 0.5)], [0.0]])
    assert_rows(outcome_advantages([1, 0, None], "rloo"), [[1.0], [-1.0], [0.0]])
    assert_rows(outcome_advantages([1, 0, None], "dr_grpo"), [[0.5], [-0.5], [0.0]])
    assert_rows(outcome_advantages([1, 0, None], "reinforce"), [[1.0], [0.0], [0.0]])


@pytest.mark.parametrize("preset", CENTRED)
def test_equal_rewards_and_a_group_of_one_give_exactly_zero(preset):
    """Exactly: 1.8 - mean([1.8, 1.8, 1.8]) is 1.2e-7 in fp32, which an epsilon of 1e-6 would make 0.1."""
    for value in (0.0, 1.0, 1.8, 0.1, -0.7):
        for G in (1, 2, 3, 7):
            assert torch.equal(outcome_advantages([value] * G, preset), torch.zeros(G, 1))
    credit = "to_go" if PRESETS[preset].scope == "group" else "own_step"  # less is to come after each step
    assert torch.equal(step_advantages([[0, 1, 2]] * 3, [[True] * 3] * 3, preset, 3, credit=credit), torch.zeros(3, 3))


@pytest.mark.parametrize("preset", [name for name in CENTRED if PRESETS[name].scope == "group"])
def test_a_group_of_one_among_others_gets_zero(preset):
    advantages = outcome_advantages([1, 1, 0], preset, group_id=[1, 0, 0])
    assert advantages[0].item() == 0 and advantages[1].item() > 0 > advantages[2].item()


@pytest.mark.parametrize("preset", PRESETS)
def test_leaving_an_abstaining_rollout_out_changes_nothing_for_the_others(preset):
    values, rest = [1.8, None, 0.3, 0.8, None, 1.0], [0, 2, 3, 5]
    rewards = terminal_rewards(values, torch.ones(6, dtype=torch.long))
    rewards.values[[1, 4]] = float("nan")
    with_it = source_advantages(rewards, torch.zeros(6, dtype=torch.long), inside([1] * 6, 1), PRESETS[preset])
    assert torch.equal(with_it[rest], outcome_advantages([values[n] for n in rest], preset))
    assert torch.equal(with_it[[1, 4]], torch.zeros(2, 1))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_group_or_batch_in_which_all_abstain_gets_zero(preset):
    assert torch.equal(outcome_advantages([None, None], preset), torch.zeros(2, 1))
    assert outcome_advantages([1, 0, None, None], preset, group_id=[0, 0, 1, 1])[2:].tolist() == [[0.0], [0.0]]
    assert outcome_advantages([], preset, T=3).shape == (0, 3)


# Step rewards, Tango eq. 5-7

# Three rollouts of one group. Steps end at these tokens, and are judged so:
STEP_ENDS = [[1, 3], [1], [0, 2]]
VERDICTS = [[True, False], [True], [True, True]]
LENGTHS = [5, 3, 4]
# eq. 3: rewards 1/2, -1/2 | 1 | 1/2, 1/2.
# eq. 5: mean of all five = 2 / 5 = 0.4; deviations 0.1, -0.9 | 0.6 | 0.1, 0.1;
#        squares 0.01 + 0.81 + 0.36 + 0.01 + 0.01 = 1.2; unbiased variance 1.2 / 4 = 0.3; std sqrt(0.3) = 0.547723.
S = 0.3 ** 0.5
A_STEP = [  # eq. 6: the sum of the steps that end at or after a token
    [-0.8 / S, -0.8 / S, -0.9 / S, -0.9 / S, 0.0],  # 0.1 - 0.9 up to token 1, then -0.9 up to token 3
    [0.6 / S, 0.6 / S, 0.0, 0.0, 0.0],
    [0.2 / S, 0.1 / S, 0.1 / S, 0.0, 0.0],          # 0.1 + 0.1 at token 0, then 0.1
]
# eq. 4: outcomes 1, 0, 0: mean 1/3, deviations 2/3, -1/3, -1/3; variance (4 + 1 + 1) / 9 / 2 = 1/3;
#        (2/3) / sqrt(1/3) = 2 / sqrt(3).
OUTCOMES = [True, False, False]
R = 3 ** -0.5
A_OUT = [[2 * R] * 5, [-R, -R, -R, 0.0, 0.0], [-R, -R, -R, -R, 0.0]]


def test_tango_by_hand():
    assert_rows(step_advantages(STEP_ENDS, VERDICTS, "grpo", T=5), A_STEP)
    assert A_STEP[0][0] == pytest.approx(-1.460593, rel=1e-6) and A_STEP[1][0] == pytest.approx(1.095445, rel=1e-6)
    # eq. 7 with alpha 1/4. First token of the first rollout: 0.75 * 1.154701 - 0.25 * 1.460593 = 0.500877.
    group_id, outcome = torch.zeros(3, dtype=torch.long), terminal_rewards(OUTCOMES, torch.tensor(LENGTHS))
    assert_rows(source_advantages(outcome, group_id, inside(LENGTHS, 5), PRESETS["grpo"]), A_OUT)
    sources = [(0.75, outcome), (0.25, step_rewards(STEP_ENDS, VERDICTS, "cpu"))]
    blended = blend(sources, group_id, inside(LENGTHS, 5), PRESETS["grpo"])
    torch.testing.assert_close(blended, 0.75 * torch.tensor(A_OUT) + 0.25 * torch.tensor(A_STEP), rtol=1e-5, atol=1e-6)
    assert blended[0, 0].item() == pytest.approx(0.500877, rel=1e-5)


@pytest.mark.parametrize("preset, expected", [
    # rewards 1/2, -1/2 | 1. rloo, baseline of the first: 1, so -1/2 and -3/2; of the second (1/2 - 1/2) / 2 = 0, so 1
    ("rloo", [[-2.0, -2.0, -1.5, -1.5], [1.0, 1.0, 1.0, 0.0]]),
    # mean 1/3, deviations 1/6, -5/6 | 2/3; return to go 1/6 - 5/6 = -2/3
    ("dr_grpo", [[-2 / 3, -2 / 3, -5 / 6, -5 / 6], [2 / 3, 2 / 3, 2 / 3, 0.0]])])
def test_step_advantages_of_other_presets_by_hand(preset, expected):
    assert_rows(step_advantages([[1, 3], [2]], [[True, False], [True]], preset, T=4), expected)


def test_credit_by_hand():
    """Two solutions, wrong in the second step and right throughout: mean and deviation of dr_grpo."""
    found = {credit: step_advantages([[1, 3], [0, 2]], [[True, False], [True, True]], "dr_grpo", 5, credit=credit)
             for credit in CREDIT}
    # +-1/2: mean 1/4; deviations 1/4, -3/4 | 1/4, 1/4, and what comes after
    assert_rows(found["to_go"], [[-1 / 2, -1 / 2, -3 / 4, -3 / 4, 0], [1 / 2, 1 / 4, 1 / 4, 0, 0]])
    # +-1: mean 1/2; each step for itself, and nothing after the last
    assert_rows(found["own_step"], [[1 / 2, 1 / 2, -3 / 2, -3 / 2, 0], [1 / 2, 1 / 2, 1 / 2, 0, 0]])
    # -1, of the second step | 1, of the last of equal ones: one entry each, of mean 0
    assert_rows(found["min"], [[-1, -1, -1, -1, 0], [1, 1, 1, 0, 0]])


@pytest.mark.parametrize("credit", CREDIT)
def test_a_solution_that_is_not_judged_has_no_advantage_whatever_the_credit(credit):
    found = step_advantages([[1, 3], [0, 2], []], [[True, False], None, []], "reinforce", 5, credit=credit)
    assert found[0].any() and not found[1:].any()


def test_rloo_gives_zero_where_no_other_rollout_of_the_group_was_judged():
    assert torch.equal(step_advantages([[1, 3], [2]], [[True, False], None], "rloo", T=4), torch.zeros(2, 4))
    assert torch.equal(step_advantages([[1, 3]], [[True, False]], "rloo", T=4), torch.zeros(1, 4))


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=25, deadline=None)
@given(judged=st.lists(st.none() | st.lists(st.booleans(), max_size=4), min_size=1, max_size=6),
       num_groups=st.integers(1, 3))
def test_step_advantages_are_finite_whatever_is_judged(preset, judged, num_groups):
    step_ends = [[2 * k for k in range(len(verdicts or []))] for verdicts in judged]
    advantages = step_advantages(step_ends, judged, preset, T=8, group_id=[n % num_groups for n in range(len(judged))])
    assert torch.isfinite(advantages).all()
    for row, verdicts in zip(advantages, judged, strict=True):
        assert verdicts or not row.any()


def sparse_case(seed: int, N: int, K: int, T: int, device: str = "cpu") -> SparseRewards:
    """Random rewards of a few values; some rollouts abstain, some have fewer entries; what is invalid is nonsense."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(-2, 3, (N, K), generator=draw) / 2
    valid = (torch.rand(N, K, generator=draw) < 0.7) & (torch.rand(N, 1, generator=draw) < 0.8)
    values[~valid] = float("nan")
    return SparseRewards(*(x.to(device) for x in (values, torch.randint(T, (N, K), generator=draw), valid)))


def naive_advantages(sources, group_id, T: int):
    """Tango eq. 4-7 with loops, in fp64."""
    groups, result = group_id.tolist(), torch.zeros(len(group_id), T, dtype=torch.float64)
    for weight, rewards in sources:
        columns = (rewards.values.tolist(), rewards.token_index.tolist(), rewards.valid.tolist())
        entries = [[(v, at) for v, at, ok in zip(*row, strict=True) if ok] for row in zip(*columns, strict=True)]
        for n, row in enumerate(entries):
            of_group = [v for m, other in enumerate(entries) if groups[m] == groups[n] for v, _ in other]
            of_group = torch.tensor(of_group, dtype=torch.float64)
            if len(set(of_group.tolist())) > 1:
                for v, at in row:
                    result[n, : at + 1] += weight * (v - of_group.mean()) / (of_group.std() + 1e-6)
    return result


@pytest.mark.parametrize("N, K, T", [(12, 1, 5), (12, 3, 7), (20, 17, 50), (1, 1, 1)])
def test_grpo_is_eq_4_to_7(N, K, T):
    for seed in range(3):
        sources = [(0.75, sparse_case(2 * seed, N, 1, T)), (0.25, sparse_case(2 * seed + 1, N, K, T))]
        draw = torch.Generator().manual_seed(seed)
        group_id = torch.tensor([7, -3, 10 ** 12, 0])[torch.randint(4, (N,), generator=draw)]
        actual, expected = (blend(sources, group_id, inside([T] * N, T), PRESETS["grpo"]),
                            naive_advantages(sources, group_id, T))
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
        assert not actual[(expected == 0).all(dim=1)].any()


def on_two_ranks(work) -> list:
    """work(rank, reduce) on two threads, whose reduce exchanges tensors as all_reduce would. -> [result of 0, of 1]"""
    barrier, slots = threading.Barrier(2, timeout=10), [None, None]

    def run(rank):
        def reduce(tensor, op="sum"):
            slots[rank] = tensor.clone()
            barrier.wait()
            both = torch.stack(slots)
            barrier.wait()
            return both.sum(0) if op == "sum" else both.amax(0)
        return work(rank, reduce)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


@pytest.mark.parametrize("split", [0, 1, 2, 5])
def test_reinforce_plus_plus_on_two_ranks_equals_one_batch(split):
    step_ends, verdicts = [[1, 3], [1], [0, 2], [0], [3]], [[True, False], [True], None, [False], [True]]
    group_id, mask = torch.tensor([0, 0, 1, 1, 1]), inside([4, 2, 3, 1, 4], 4)
    whole = step_rewards(step_ends, verdicts, "cpu")

    def work(rank, reduce):
        rows = slice(0, split) if rank == 0 else slice(split, 5)
        part = SparseRewards(whole.values[rows], whole.token_index[rows], whole.valid[rows])
        return source_advantages(part, group_id[rows], mask[rows], PRESETS["reinforce++"], reduce)
    # Returns 0, 0, -1/2, -1/2 | 1, 1 | -1 | 1, 1, 1, 1 of 11 tokens: mean 4/11; squares 7.5 less 11 (4/11)^2, over 10.
    m, s = 4 / 11, (66.5 / 110) ** 0.5
    expected = [[-m / s, -m / s, (-0.5 - m) / s, (-0.5 - m) / s], [(1 - m) / s, (1 - m) / s, 0, 0], [0] * 4,
                [(-1 - m) / s, 0, 0, 0], [(1 - m) / s] * 4]
    assert_rows(source_advantages(whole, group_id, mask, PRESETS["reinforce++"]), expected)
    assert_rows(torch.cat(on_two_ranks(work)), expected)


def test_rewards_that_are_equal_on_each_rank_alone_carry_signal_and_a_group_never_asks_other_ranks():
    """[1, 1 | 0, 0]: mean 1/2, std sqrt(4 / 4 / 3) = sqrt(1/3), so +-0.866025. Equal on both ranks: exactly 0."""
    def advantages(*values):
        mask, preset = inside([1, 1], 1), PRESETS["reinforce++"]
        return torch.cat(on_two_ranks(lambda rank, reduce: source_advantages(
            terminal_rewards([values[rank]] * 2, torch.tensor([1, 1])), GROUP, mask, preset, reduce)))
    h = 0.75 ** 0.5
    assert_rows(advantages(1, 0), [[h], [h], [-h], [-h]])
    assert torch.equal(advantages(1.8, 1.8), torch.zeros(4, 1))
    def reduce(tensor, op="sum"):
        raise AssertionError("a collective call for a group")
    for preset in PRESETS.values():
        if preset.scope == "group":
            source_advantages(terminal_rewards([1, 0], torch.tensor([1, 1])), GROUP, inside([1, 1], 1), preset, reduce)


def test_merged_rewards_are_normalised_together():
    """Outcomes .5 and 0 at token 1; steps .25 .25 and .25 -.25 at tokens 0 and 1: mean 1/6. What stands at or after a
    token: 1/3 + 1/12 + 1/12 and 1/3 + 1/12; -1/6 + 1/12 - 5/12 and -1/6 - 5/12."""
    sources = [(0.5, terminal_rewards([True, False], torch.tensor([2, 2]))),
               (0.5, step_rewards([[0, 1], [0, 1]], [[True, True], [True, False]], "cpu"))]
    assert_rows(merge(sources, GROUP, BOTH, PRESETS["dr_grpo"]), [[1 / 2, 5 / 12], [-1 / 2, -7 / 12]])
    scaled = merge(sources, GROUP, BOTH, PRESETS["grpo"])  # sum of squares 16+4+1+1+1+25 = 48 over 144, unbiased: 1/15
    assert_rows(scaled, [[1 / 2 * 15 ** 0.5, 5 / 12 * 15 ** 0.5], [-1 / 2 * 15 ** 0.5, -7 / 12 * 15 ** 0.5]])


@pytest.mark.parametrize("preset", PRESETS)
def test_merging_one_source_is_normalising_it_and_one_without_weight_is_none(preset):
    steps = step_rewards([[0, 1], [1]], [[True, False], [True]], "cpu")
    outcome = terminal_rewards([True, False], torch.tensor([2, 2]))
    of = lambda rewards: source_advantages(rewards, GROUP, BOTH, PRESETS[preset])
    if PRESETS[preset].scale != "none":  # a common factor falls out of what is divided by its spread
        torch.testing.assert_close(merge([(0.3, steps)], GROUP, BOTH, PRESETS[preset]), of(steps), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(merge([(1.0, outcome), (0.0, steps)], GROUP, BOTH, PRESETS[preset]), of(outcome))


# The masked are 1, 2 | 3, 6: mean 12 / 4 = 3; deviations -2, -1 | 0, 3; squares 4 + 1 + 0 + 9 = 14;
# unbiased variance 14 / 3.
UNWHITE, MASK = torch.tensor([[1.0, 2.0, 9.0], [float("nan"), 3.0, 6.0]]), torch.tensor([[1, 1, 0], [0, 1, 1]])
W = (14 / 3) ** 0.5
WHITE = [[-2 / W, -1 / W, 0.0], [0.0, 0.0, 3 / W]]


@pytest.mark.parametrize("split", [0, 1, 2])
def test_whitening_by_hand_and_on_two_ranks(split):
    def work(rank, reduce):
        rows = slice(0, split) if rank == 0 else slice(split, 2)
        return whiten(UNWHITE[rows], MASK[rows], reduce)
    assert_rows(whiten(UNWHITE, MASK), WHITE)
    assert_rows(torch.cat(on_two_ranks(work)), WHITE)
    assert torch.equal(whiten(UNWHITE, MASK.bool()), whiten(UNWHITE, MASK))


def test_whitening_of_equal_advantages_gives_exactly_zero_and_loses_nothing_far_from_it():
    advantages = torch.tensor([[1.8, 1.8, 5.0], [1.8, 0.3, 0.2]])
    for mask in ([[1, 1, 0], [1, 0, 0]], [[0, 0, 1], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]):
        assert torch.equal(whiten(advantages, torch.tensor(mask)), torch.zeros(2, 3))
    equal = lambda rank, reduce: whiten(advantages[rank:rank + 1], torch.tensor([[1, 1 - rank, 0]]), reduce)
    assert torch.equal(torch.cat(on_two_ranks(equal)), torch.zeros(2, 3))
    # 1e6 + (-1, 0, 1), ten thousand times: mean 1e6, variance 2/3; in fp32 their sum would be inexact.
    assert_rows(whiten(torch.tensor([[0.0, 2e-6]]), torch.ones(1, 2)), [[1 - 2 ** 0.5, 2 ** 0.5 - 1]])
    offset = torch.tensor([-1.0, 0.0, 1.0]).repeat(10000)[None]
    torch.testing.assert_close(whiten(1e6 + offset, torch.ones(1, 30000)), offset * 1.5 ** 0.5, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rewards, values, mask, gamma, lam, expected", [
    # d = .25 - .5, .75 - .25, 1 - .75; A_3 = .25, A_2 = .5 + .5 * .25, A_1 = -.25 + .5 * .625
    ([0.0, 0.0, 1.0], [0.5, 0.25, 0.75], [1, 1, 1], 1.0, 0.5, [0.0625, 0.625, 0.25]),
    # d_1 = .5 * .25 - .5, d_2 = .5 * .75 - .25; A_2 = .125 + .5 * .25, A_1 = -.375 + .5 * .25
    ([0.0, 0.0, 1.0], [0.5, 0.25, 0.75], [1, 1, 1], 0.5, 1.0, [-0.25, 0.25, 0.25]),
    ([0.0, 0.0, 1.0], [0.5, 0.25, 0.75], [1, 1, 1], 1.0, 0.0, [-0.25, 0.5, 0.25]),  # d alone
    # the third token is padding: V is 0 after the second
    ([0.0, 1.0, 0.0], [0.5, 0.5, 9.0], [1, 1, 0], 1.0, 0.5, [0.25, 0.5, 0.0]),
    # a tool put the second: d_1 = .75 - .5, A_1 = .25 + .5 * .25
    ([0.0, 0.0, 1.0], [0.5, 9.0, 0.75], [1, 0, 1], 1.0, 0.5, [0.375, 0.0, 0.25]),
    ([0.0, 1.0, 0.0], [0.25, 9.0, 9.0], [1, 0, 0], 1.0, 0.5, [0.75, 0.0, 0.0]),     # and its reward is the first's
    ([1.0, 1.0, 1.0], [0.5, 0.5, 0.5], [0, 0, 0], 1.0, 0.5, [0.0, 0.0, 0.0])])
def test_generalised_advantages_by_hand(rewards, values, mask, gamma, lam, expected):
    rewards, values, mask = (torch.tensor([x]) for x in (rewards, values, mask))
    assert_rows(gae(rewards, values, mask.bool(), gamma, lam), [expected])


# Two right and two wrong solutions of one group. Steps end at tokens 0 and 2; of the first of each kind the second step
# is judged wrong.
RIGHT = [True, True, False, False]
SAID = [[True, False], [True, True], [True, False], [True, True]]


def combined(name: str, preset: str = "dr_grpo", outcomes=RIGHT, said=SAID, credit="own_step", negative_weight=1.0):
    """A_out + A_step of solutions of three tokens, of one group."""
    sources = [(1.0, terminal_rewards(outcomes, torch.tensor([3] * len(said)), negative_weight)),
               (1.0, step_rewards([[0, 2]] * len(said), said, "cpu", credit))]
    return COMBINE[name](sources, torch.zeros(len(said), dtype=torch.long), inside([3] * len(said), 3), PRESETS[preset])


def test_ways_to_combine_by_hand():
    """Outcomes +-1/2. Steps 1, -1 | 1, 1 twice: mean 1/2, so 1/2 and -3/2 | 1/2 and 1/2 in the group and in each half
    of it. Of each half one is chosen: the second of the right ones, the first of the wrong ones."""
    assert_rows(combined("advantages"), [[1.0, -1.0, -1.0], [1.0] * 3, [0.0, -2.0, -2.0], [0.0] * 3])
    torch.testing.assert_close(combined("stratified"), combined("advantages"))
    # among right ones 1, 1 | 1, 1 says nothing; among wrong ones 1, -1 | -1, -1 has mean -1/2
    assert_rows(combined("stratified", said=[[True, True]] * 2 + [[True, False], [False, False]]),
                [[0.5] * 3, [0.5] * 3, [1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    assert_rows(combined("filtered"), [[0.0] * 3, [0.5] * 3, [-0.5] * 3, [0.0] * 3])


def test_what_cannot_be_read_or_scored_or_earns_a_part_is_no_right_solution():
    """Filtered: of what has no verdicts a wrong solution stays and a right one goes, and what has no outcome takes no
    one's place. A part of the reward makes no right solution."""
    assert_rows(combined("filtered", said=[[True, False], None, [False, False], None]),
                [[0.5] * 3, [0.0] * 3, [0.0] * 3, [-0.5] * 3])
    assert_rows(combined("filtered", outcomes=[True, False, None, None], said=[[True, True]] * 2 + [[False] * 2] * 2),
                [[0.5] * 3, [-0.5] * 3, [0.0] * 3, [0.0] * 3])
    of = dict(outcomes=[1.0, 0.6, 0.0, 0.0], said=[[True, False], [True, True], [False] * 2, None])
    # less their mean .4 the outcomes are .6, .2, -.4, -.4; the steps are +-1, of mean 0 on either side
    assert_rows(combined("stratified", **of), [[1.6, -0.4, -0.4], [1.2] * 3, [-1.4] * 3, [-0.4] * 3])
    # the right one, and of the wrong ones what has no verdicts and the one with the most blame: of mean 1/3
    assert_rows(combined("filtered", **of), [[2 / 3] * 3, [0.0] * 3, [-1 / 3] * 3, [-1 / 3] * 3])


@pytest.mark.parametrize("preset", PRESETS)
def test_with_min_credit_more_steps_earn_no_more(preset):
    """Solutions of two and of eight steps with the same worst step: all alike, where all are."""
    few, many = [list(range(1, 2 * K, 2)) for K in (2, 8)]
    rewards = step_rewards([few, many, few, many], [[0, 0], [0] * 8, [1, 0], [1] * 7 + [0]], "cpu", "min")
    found = source_advantages(rewards, torch.tensor([0, 0, 0, 0]), inside([4, 16, 4, 16], 16), PRESETS[preset])
    assert torch.equal(found[0, :4], found[1, :4]) and torch.equal(found[2, :4], found[3, :4])


def test_over_tokens_too_what_stands_after_the_last_step_is_not_moved():
    rewards = step_rewards([[0, 2], [0, 2]], [[True, True], [True, False]], "cpu", "own_step")
    found = source_advantages(rewards, torch.tensor([0, 1]), inside([5, 5], 5), PRESETS["reinforce++"])
    assert_rows(found[:, 3:], [[0.0, 0.0]] * 2)
    assert found.sum().abs() < 1e-6 and (found[1, 1:3] < 0).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_weight_of_negative_advantages_is_on_outcomes_alone_and_never_turns_a_sign(preset):
    both = [combined("advantages", preset, said=[None] * 4, negative_weight=weight) for weight in (1.0, 0.25)]
    assert torch.equal(both[1], torch.where(both[0] < 0, 0.25 * both[0], both[0]))
    steps = [combined("advantages", preset, outcomes=[None] * 4, negative_weight=weight) for weight in (1.0, 0.25)]
    assert torch.equal(*steps) and (preset == "reinforce" or (steps[0] < 0).any())


@pytest.mark.parametrize("credit", CREDIT)
@settings(max_examples=50, deadline=None)
@given(outcomes=st.lists(st.sampled_from([True, False, None]), min_size=8, max_size=8),
       said=st.lists(st.none() | st.lists(st.booleans(), min_size=2, max_size=2), min_size=8, max_size=8),
       negative_weight=st.sampled_from([0.0, 0.3, 1.0]))
def test_no_source_pays_who_has_nothing_from_it(credit, outcomes, said, negative_weight):
    """Two groups of four. A solution without verdicts, such as one that breaks the form, gets what its outcome says,
    and a wrong answer is never paid by it; where all outcomes of a group are alike, what its steps say."""
    group_id = torch.tensor([0] * 4 + [1] * 4)
    outcome = terminal_rewards(outcomes, torch.tensor([3] * 8), negative_weight)
    steps = step_rewards([[0, 2]] * 8, said, "cpu", credit)
    of = lambda *sources: blend(list(sources), group_id, inside([3] * 8, 3), PRESETS["grpo"])
    A_out, A_step, both = of((0.7, outcome)), of((0.3, steps)), of((0.7, outcome), (0.3, steps))
    for n in range(8):
        group = [o for m, o in enumerate(outcomes) if m // 4 == n // 4 and o is not None]
        if said[n] is None:
            assert torch.equal(both[n], A_out[n]) and (outcomes[n] or (both[n] <= 0).all())
        if outcomes[n] is None or len(set(group)) < 2:
            assert torch.equal(both[n], A_step[n])
