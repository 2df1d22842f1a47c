"""Learning to Self-Verify: the turns, whose rollouts the one model learns from, and balanced verifier steps."""
import pytest
from test_dpo import are_equal, parsed, random_play, weights_of

from nanochat import recipes
from nanochat.rl.play.updates import apply_update

self_verify = recipes.load("self_verify")


def phases(num: int, *flags: str) -> str:
    """The first letters of the phases of so many steps, which are not played."""
    t, found = random_play("self_verify", *flags), ""
    t.log = lambda role, values: None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_verify, "solve", lambda t: [])
        patch.setattr(self_verify.tango, "verifier_step", lambda t: [])
        for _ in range(num):
            list(self_verify.play(t))
            found += t.memory["phase"][0]
    return found


@pytest.mark.parametrize("flags, expected", [
    ([], "gggggvgggggvgg"),
    (["--generator-steps", "1", "--verifier-steps", "2"], "gvvgvvg"),
    (["--warmup-steps", "5", "--num-steps", "5"], "wwwww"),                    # verification alone
    (["--warmup-steps", "3", "--verifier-steps", "0"], "wwwggggggggg"),        # verification first
    (["--verifier-steps", "0"], "gggggggggggg")])                              # generation alone
def test_the_turns_are_as_the_docstring_says(base, flags, expected):
    assert phases(len(expected), *flags) == expected


def test_both_kinds_of_steps_move_the_one_model_and_count_as_its_steps(base):
    t = random_play("self_verify", "--generator-steps", "1", "--verifier-max-new-tokens", "36")
    t.roles["verifier"].model = t.roles["generator"].model
    for step, what in enumerate(("generator", "verifier")):
        t.state.step, t.done = step, set()
        before = weights_of(t.roles["generator"].model)
        update, = self_verify.play(t)
        (rollouts, advantages), = update.parts
        assert update.role == "generator" and t.memory["phase"] == what
        assert all((prompt.solution is not None) == (what == "verifier") for prompt in rollouts.prompts)
        advantages[:, 0] += 1.0  # random texts are no verifications and earn nothing
        assert apply_update(t, update)["skipped"] == 0
        assert not are_equal(before, weights_of(t.roles["generator"].model))
    assert t.steps == {"generator": 2, "verifier": 0}


def test_a_verdict_alone_is_rewarded_and_right_and_wrong_solutions_are_balanced():
    args = parsed("self_verify")
    assert (args.gamma, args.class_weights, args.verifier_balance) == (0.0, False, True)
    assert args.verifier_head == "prompt" and self_verify.updates(args) == {"generator": 4, "verifier": 0}
