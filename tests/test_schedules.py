"""Who moves next, alpha and the learning rate, step by step."""
import pytest

from nanochat.rl.credit.schedules import (FOLLOWS, LR_SCHEDULES, SCHEDULES, PhaseLengths, adaptive, exponential_decay,
                                          fixed, next_phase)


def phases(lengths: PhaseLengths, num_steps: int, schedule=fixed, balanced_acc=lambda step: None) -> str:
    """The phase of each optimizer step, as its first letter: w(arm-up), g(enerator), v(erifier)."""
    phase, phase_steps, letters = "warmup", 0, ""
    for step in range(num_steps):
        phase, phase_steps = next_phase(phase, phase_steps, balanced_acc(step), lengths, schedule)
        letters += phase[0]
        phase_steps += 1
    return letters


@pytest.mark.parametrize("lengths, expected", [
    (PhaseLengths(2, 3, 1), "wwgggvgg"),  # Tango algorithm 1
    (PhaseLengths(0, 3, 1), "gggvgggv"),
    (PhaseLengths(0, 1, 2), "gvvgvvgv"),
    (PhaseLengths(2, 3, 0), "wwgggggg"),     # the verifier is fixed after its warm-up
    (PhaseLengths(0, 3, 0), "gggggggg"),     # no verifier phases at all: GRPO
    (PhaseLengths(0, 0, 2), "vvvvvvvv"),     # the generator is fixed
    (PhaseLengths(2, 0, 2), "wwvvvvvv"),
    (PhaseLengths(1, 1, 1), "wgvgvgvg")])
def test_phases_of_length_zero_are_passed_by(lengths, expected):
    assert phases(lengths, 8) == expected


@pytest.mark.parametrize("phase", FOLLOWS)
def test_a_phase_goes_on_until_its_number_of_steps_is_done(phase):
    lengths = PhaseLengths(4, 5, 6)
    length = getattr(lengths, phase)
    assert next_phase(phase, length - 1, None, lengths) == (phase, length - 1)
    assert next_phase(phase, length, None, lengths) == (FOLLOWS[phase], 0)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_asking_twice_gives_the_same_phase(schedule):
    """A resumed run asks again before its first step."""
    lengths = PhaseLengths(2, 3, 1, bar=0.7)
    for phase in FOLLOWS:
        for phase_steps in range(5):
            for balanced_acc in (None, 0.5, 0.9):
                once = next_phase(phase, phase_steps, balanced_acc, lengths, schedule)
                assert next_phase(*once, balanced_acc, lengths, schedule) == once


def test_adaptive_ends_the_verifiers_phases_at_the_bar_and_the_generators_never():
    lengths = PhaseLengths(10, 3, 10, bar=0.7)
    for balanced_acc, over in ((None, False), (0.69, False), (0.7, True), (0.9, True)):
        assert adaptive("warmup", 1, balanced_acc, lengths) == over
        assert adaptive("verifier", 1, balanced_acc, lengths) == over
        assert not adaptive("generator", 1, balanced_acc, lengths)
    for phase, length in (("warmup", 10), ("generator", 3), ("verifier", 10)):  # at most as long as fixed ones
        assert adaptive(phase, length, 0.5, lengths) and not adaptive(phase, length - 1, 0.5, lengths)


def test_an_adaptive_run_step_by_step():
    """Below the bar until step 3: the warm-up of at most 5 ends there. Again below from step 6 on."""
    lengths = PhaseLengths(5, 3, 2, bar=0.7)
    above = {3, 4, 5}
    assert phases(lengths, 12, adaptive, lambda step: 0.8 if step in above else 0.6) == "www" "ggg" "vv" "ggg" "v"
    # One that is always good enough moves one step a phase: only its own steps tell whether it still is.
    assert phases(lengths, 8, adaptive, lambda step: 0.8) == "wgggvggg"
    assert phases(lengths, 8, adaptive, lambda step: None) == phases(lengths, 8, fixed) == "wwwwwggg"
    # Without generator steps the verifier is trained also above the bar.
    assert phases(PhaseLengths(0, 0, 2, bar=0.7), 5, adaptive, lambda step: 0.8) == "vvvvv"


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
