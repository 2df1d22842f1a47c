"""Sampling and updates on paper: they seat rows and pack micro-batches as the real ones do, and count by hand."""
import itertools

import pytest
from conftest import parse
from test_engine import keys_for, random_prompts, sampled, tiny_model
from test_engine_graphs import emulate
from test_trainer import EVERYTHING, packed, random_advantages, random_rollouts

from dev.bench import clock, lengths, ranks, waits
from dev.bench.clock import Card, Fill, Policy, Shape, Steps, decoding, seated
from nanochat.attention import PADDING_POSITION
from nanochat.common import BadInput

CARD = Card(bandwidth=100.0, launch=1.0, products=20.0, prefill=10.0, train=8.0, eager=3.0, look=7.0)
SHAPE = Shape(weights=50, head=10, prompt_weights=20, parameters=45, cached=4, launches=2)


def steps_of(events):
    return [event for event in events if isinstance(event, Steps)]


@pytest.mark.parametrize("max_rows, graphs, every", [(1024, True, 4), (9, True, 4), (9, False, 1)])
def test_rows_sit_as_in_the_engine(monkeypatch, max_rows, graphs, every):
    if graphs:
        emulate(monkeypatch, check_every=every)
    model, prompts = tiny_model(), random_prompts(6, 2, 130, 7)
    out = sampled(model, prompts, 8, keys_for(32), max_new_tokens=20, stop_tokens=list(range(20)), max_rows=max_rows)
    groups = [group.tolist() for group in out.lengths.view(4, 8)]
    policy = Policy(every=every, graphs=graphs)
    events = list(decoding(seated(groups, [6, 2, 130, 7], max_rows), groups, [6, 2, 130, 7], policy))
    sizes = [event.size for event in steps_of(events) for _ in range(event.steps)]
    assert sizes == model.decoding and len(set(sizes)) > 1
    assert sum(event.drawn for event in steps_of(events)) == int((out.lengths - 1).sum())
    assert sum(n for event in events if isinstance(event, Fill) for n, _ in event.pieces) == 4


def test_policies_by_hand():
    """Two rows sit, one of 1 + 2 tokens, one of 1 + 7; looks are every 4 tokens. The third, of 1 + 3, gets the free
    place at the first look, or a window later."""
    groups, prompts = [[3], [8], [4]], [7, 6, 5]
    now = steps_of(clock.sampling(groups, prompts, 2, Policy(every=4)))
    assert [(e.size, e.steps, e.drawn, e.ended, e.waiting) for e in now] == [(2, 4, 6, 2, True), (2, 4, 6, 2, False)]
    assert now[0].read == 4 * (7 + 6) + 2 * (1 + 2 + 3 + 4)
    late = steps_of(clock.sampling(groups, prompts, 2, Policy(every=4, late=True)))
    assert [(e.drawn, e.ended) for e in late] == [(6, 2), (3, 5), (3, 5), (0, 4)]
    pieces = lambda ahead: [e.pieces for e in clock.sampling(groups, prompts, 2, Policy(ahead=ahead))
                            if isinstance(e, Fill)]
    assert pieces(False) == [[(2, 7)], [(1, 5)]] and pieces(True) == [[(3, 7)], []]
    sizes = lambda more: {e.size for e in steps_of(clock.sampling([[n] for n in range(1, 65)], [3] * 64, 64,
                                                                  Policy(every=1, sizes=more)))}
    assert sizes(0) == {64, 32, 16, 8} and sizes(4) == {64, 48, 32, 16, 8}


def test_seconds_by_hand():
    """A step of 2 places: 2 launches, (100 bytes of weights + 10 tokens of 4) / 100, 2 rows x 100 FLOPs / 20."""
    assert clock.step_seconds(CARD, SHAPE, 2, 10) == pytest.approx(2 + 1.4 + 10)
    assert [clock.prefill_seconds(CARD, SHAPE, *piece) for piece in ((3, 5), (1, 1))] == [2 * 20 * 15 / 10, 2 * 3]
    events = [Fill([(3, 5)]), Steps(2, 4, 6, 2, 40, True), Steps(1, 4, 3, 1, 40, False)]
    parts = clock.seconds(events, CARD, SHAPE)
    two, one = 4 * 13.4, 4 * (2 + 1.4 + 5)
    assert parts == pytest.approx({"drawing": two * 6 / 8 + one * 3 / 8, "ended": two * 2 / 8 + one * 1 / 8, "free": 0,
                                   "tail": one * 4 / 8, "fills": 60, "graphs": 2 * 2 * 6, "looks": 14})
    assert clock.seconds(events, CARD, SHAPE, Policy(kept=True, late=True)) == pytest.approx(
        parts | {"graphs": 0, "looks": 0})


def test_cards_say_the_stages_that_they_are_fitted_to():
    shapes = clock.shapes()
    for i, card in enumerate(clock.CARDS.values()):
        for name, (of, P, G, prompt, completion, *measured) in list(clock.STAGES.items())[:2]:
            parts = clock.seconds(clock.sampling([[completion] * G] * P, [prompt] * P, 1024), card, shapes[of])
            whole = sum(parts.values()) - ("without its prefill" in name) * parts["fills"]
            assert whole == pytest.approx(measured[i], rel=0.02)


@pytest.mark.parametrize("max_tokens", [1, 40, 150, EVERYTHING])
def test_micro_batches_are_those_that_are_packed(max_tokens):
    lengths = [[5, 3, 9], [1, 1, 2], [30, 8, 2], [4, 4, 4]]
    rollouts = random_rollouts([7, 20, 3, 11], list(itertools.chain(*lengths)))
    real = packed(rollouts, random_advantages(rollouts), max_tokens=max_tokens)
    sizes = [(int((batch.prompt_positions < PADDING_POSITION).sum()) + len(batch.index), len(batch.index))
             for batch in real]
    assert ranks.micro_batches(list(zip([7, 20, 3, 11], lengths, strict=True)), max_tokens) == sizes


def test_dealing_and_waiting_by_hand():
    assert ranks.in_turn([1, 2, 3, 4, 5], 2) == [[1, 3, 5], [2, 4]]
    assert ranks.longest_first([1, 9, 2, 3, 4], 2, lambda n: n) == [[9, 1], [4, 3, 2]]
    problem = lambda n: ranks.Problem(2, [n], [3], [2], n)
    dealt = [[problem(6), problem(2)], [problem(6)]]
    # 8 x 40 FLOPs a token and 8 x 10 more a trained one, at 8 FLOP/s. Rank 0 has micro-batches of 4 tokens, 2 of them
    # trained, and of 8 and 6: 180 and 380 s, rank 1 one of 380
    took, own = ranks.updated(dealt, 8, CARD, SHAPE, shard=True, largest_first=False)
    assert own == [560, 380] and took == pytest.approx(380 + 380)
    assert ranks.updated(dealt, 8, CARD, SHAPE, shard=True)[0] == pytest.approx(380 + 180)
    took, own = ranks.updated(dealt, 8, CARD, SHAPE, shard=False)
    assert own == [560, 380] and took == pytest.approx(560)
    step = ranks.step(dealt, CARD, SHAPE, max_tokens=8, shard=False)
    assert step.waited["update"] == pytest.approx(90) and step.whole == pytest.approx(sum(step.took.values()))
    assert ranks.step(dealt, CARD, SHAPE, max_tokens=8, shard=False, update_evenly=True).took["update"] == 470
    both = ranks.step(dealt, CARD, SHAPE, shard=False, at_once=True)
    assert both.took["both"] <= step.took["sampling"] + step.took["verification"]


def test_one_queue_is_taken_from_by_whoever_has_a_place():
    """Two ranks of one place each and rows of 1 + 16, 1 + 16, 1 + 64, 1 + 16: the rank that is free first goes on."""
    groups = [[17], [65], [17], [17]]
    clocks = ranks.sampled_from_one_queue(groups, [2] * 4, 1, 2, CARD, SHAPE)
    alone = [ranks.sampled([groups[i] for i in rows], [2] * len(rows), 1, CARD, SHAPE) for rows in ([0, 2, 3], [1])]
    assert sorted(clocks) == pytest.approx(sorted(alone))


def test_waits_of_a_noted_run_by_hand():
    """Two collectives in a step: sampling, nothing, an update. Rank 0 takes 2 + 1 + 4 s, rank 1 takes 5 + 1 + 2."""
    def notes(sampling, update, rows):
        return [["sampling", 0.0, sampling, [1, rows, 1]], ["wait", sampling, sampling, []],
                ["wait", sampling + 1, sampling + 1, []], ["update", sampling + 1, sampling + update + 1, [1, rows]],
                ["step", 0.0, sampling + update + 1, []], ["sampling", 50.0, 60.0, [1, 1, 1]]]
    stretches = [waits.between_waits(notes(*given)) for given in ((2.0, 4.0, 10), (5.0, 2.0, 30))]
    assert stretches[0] == [("sampling", 2.0, [1, 10, 1]), ("other", 1.0, []), ("update", 4.0, [1, 10])]
    found = waits.waiting(stretches, {"sampling": [0, 0.1, 0], "update": [1, 0.1]})
    assert list(found.values()) == [pytest.approx(x) for x in ([5, 1.5, 3, 1], [4, 1, 4, 1], [1, 0, 0, 0])]


def test_lengths_of_the_pair_are_read(tmp_path):
    out = str(tmp_path / "lengths.json")
    lengths.main(parse(lengths, ["--generator-tag", "pair-gen", "--verifier-tag", "pair-ver", "--problems", "2",
                                 "--num-samples", "2", "--max-new-tokens", "9", "--verifier-max-new-tokens", "5",
                                 "--device-type", "cpu", "--out", out]))
    problems = ranks.real(out)
    assert len(problems) == 2 and all(len(p.solutions) == 2 for p in problems)
    assert all(0 < n <= 9 for p in problems for n in [*p.solutions, p.known])
    assert all(n > p.prompt and 0 < m <= 5 for p in problems for n, m in zip(p.read, p.verifications, strict=True))
    with pytest.raises(BadInput, match="lengths.json: has 2 problems, and a step takes 128$"):
        ranks.main(parse(ranks, ["--lengths", out]))
