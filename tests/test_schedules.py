"""Who moves next, alpha and the learning rate, step by step."""
import pytest

from nanochat.recipes.tango._phases import FOLLOWS, next_phase
from nanochat.rl.credit.schedules import LR_SCHEDULES, exponential_decay, lr_factor


@pytest.mark.parametrize("lengths, expected", [
    ((2, 3, 1), "wwgggvgg"),  # Tango algorithm 1
    ((0, 3, 1), "gggvgggv"), ((0, 1, 2), "gvvgvvgv"), ((1, 1, 1), "wgvgvgvg"),
    ((2, 3, 0), "wwgggggg"),  # the verifier is fixed after its warm-up
    ((0, 3, 0), "gggggggg")])
def test_phases_step_by_step(lengths, expected):
    """The first letters of the phases. Asking twice, as a resumed run does, gives the same phase."""
    lengths, phase, made, letters = dict(zip(FOLLOWS, lengths, strict=True)), "warmup", 0, ""
    for _ in range(8):
        phase, made = next_phase(phase, made, lengths)
        assert next_phase(phase, made, lengths) == (phase, made)
        letters, made = letters + phase[0], made + 1
    assert letters == expected


@pytest.mark.parametrize("phase", FOLLOWS)
def test_a_phase_goes_on_until_its_number_of_steps_is_made(phase):
    lengths = {"warmup": 4, "generator": 5, "verifier": 6}
    assert next_phase(phase, lengths[phase] - 1, lengths) == (phase, lengths[phase] - 1)
    assert next_phase(phase, lengths[phase], lengths) == (FOLLOWS[phase], 0)


def test_alpha_decays_exponentially_from_start_to_end():
    """0.1 to 0.001: half way their geometric mean 0.01."""
    assert [exponential_decay(0.1, 0.001, p) for p in (0.0, 0.5, 1.0)] == pytest.approx([0.1, 0.01, 0.001], rel=1e-12)
    assert exponential_decay(0.5, 0.001, 0.3) == pytest.approx(0.5 * 0.002 ** 0.3, rel=1e-12)
    for start, end in ((0.0, 0.1), (0.1, 0.0), (0.0, 0.0), (0.3, 0.3)):  # no decay
        assert [exponential_decay(start, end, progress) for progress in (0.0, 0.5, 1.0)] == [start] * 3


def test_learning_rate_schedules_by_hand():
    values = {name: [schedule(progress) for progress in (0.0, 0.5, 1.0)] for name, schedule in LR_SCHEDULES.items()}
    assert values["constant"] == [1.0, 1.0, 1.0]
    assert values["linear"] == pytest.approx([1.0, 0.55, 0.1], rel=1e-12)
    assert values["exponential"] == pytest.approx([1.0, 0.1 ** 0.5, 0.1], rel=1e-12)
    assert values["cosine"] == pytest.approx([1.0, 0.525, 0.05], rel=1e-12)


def test_the_rate_warms_up_linearly_to_1_then_falls():
    """As SFT has it, whose schedule ends after the last step, and RL, where it ends with it."""
    rates = [lr_factor("cosine", 0.1, step, 100, 100) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert rates[10] == 1.0 and rates[100] == pytest.approx(0.05)
    assert rates[55] == pytest.approx(0.525)  # halfway down: (1 + 0.05) / 2
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert lr_factor("cosine", 0.5, 0, 8, 8) == 0.25 and lr_factor("constant", 0.5, 3, 8, 8) == 1.0
    assert lr_factor("cosine", 0.0, 0, 1000, 1000) == 1.0
    assert [lr_factor("linear", 0.0, step, 3, 2) for step in range(4)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert [lr_factor("linear", 0.5, step, 4, 3) for step in range(4)] == pytest.approx([0.5, 1.0, 1.0, 0.1])
    for num_steps in (1, 2, 5):
        rates = [lr_factor("cosine", 0.1, step, num_steps, num_steps) for step in range(num_steps)]
        assert all(0 < rate <= 1 for rate in rates) and rates[0] == 1.0
