"""
Talk to a model in the terminal; with --verifier, watch the verifier judge each step of what it says.

A model that was trained on a task here (its checkpoint says so) reads your message as a problem of that task; any
other, as chat. `clear` begins anew, `quit` ends. Calculator calls are shown as [48/2 = 24].

    python -m scripts.chat_cli -i sft -g d24
    python -m scripts.chat_cli -i rl -g chain-s0-gen --verifier chain-s0-ver -p "3+5*2-4"
"""
import codecs

from nanochat.calculator import Calculator
from nanochat.checkpoint import default_tag, list_steps
from nanochat.cli import add_device_arg, at_least, check_name, new_parser, script_main
from nanochat.common import BadInput, init_device, one_line, printable
from nanochat.engine import check_temperature, generate, row_key
from nanochat.hf.tokenizer import HFTokenizer, load_tokenizer
from nanochat.rl.measure.scores import aligned
from nanochat.rl.records.prompts import (Verification, generator_prompt, parse_verification, read_solution,
                                         verifier_prompt)
from nanochat.rl.report.terminal import add_colour_flag, paint, wants_colour
from nanochat.storage.files import found_at
from scripts.verifier_eval import load
from tasks import format_of, recorded_value
from tasks.formats import FORMATS, PROMPTS, Format, with_prompts

COLOURS = {True: "32", False: "31", None: "33"}  # green, red, yellow
WORDS = {True: "right", False: "wrong", None: "no verdict"}
SHOWN = {"<|python_start|>": "[", "<|python_end|>": " = ", "<|output_start|>": "", "<|output_end|>": "]"}


def make_parser():
    parser = new_parser(__doc__)
    parser.add_argument("-i", "--source", choices=["sft", "rl"], default="sft", help="stage of the checkpoint")
    parser.add_argument("-g", "--model-tag", default="", help="default: the largest d<N>")
    parser.add_argument("-s", "--step", type=at_least(-1), default=-1, help="-1 = the last")
    parser.add_argument("-p", "--prompt", default=None, help="one message, one answer, and no conversation")
    parser.add_argument("-t", "--temperature", type=float, default=0.6, help="0 = greedy")
    parser.add_argument("-k", "--top-k", type=at_least(0), default=50, help="0 = the full softmax")
    parser.add_argument("-m", "--max-new-tokens", type=at_least(1), default=256,
                        help="of an answer, and of a verification")
    parser.add_argument("--verifier", default="",
                        help="tag of a verifier, of the same stage or of SFT: it judges each step (greedy)")
    parser.add_argument("--format", default="", choices=["", *FORMATS, "chat"],
                        help="how problems are put; default: the task's in the checkpoint")
    add_colour_flag(parser)
    parser.add_argument("--seed", type=int, default=0)
    add_device_arg(parser)
    return parser


class Speaker:
    """The sampler's tool of a conversation: prints each token as it comes and does what the calculator says."""

    def __init__(self, tokenizer):
        self.tokenizer, self.calculator = tokenizer, Calculator(tokenizer) if tokenizer.has_calculator else None
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.shown = {tokenizer.special(name): text for name, text in SHOWN.items()} if self.calculator else {}

    def say(self, token: int) -> None:
        if token not in self.tokenizer.stop_tokens:
            text = self.shown[token] if token in self.shown else self.decoder.decode(self.tokenizer.token_bytes(token))
            print(printable(text), end="", flush=True)

    def __call__(self, rows: list[int], tokens: list[int]) -> dict[int, int]:
        for token in tokens:
            self.say(token)
        if self.calculator is None:
            return {}
        forced = self.calculator(rows, tokens)
        if self.calculator.python_end in tokens and not forced:
            print("?]", end="", flush=True)
        return forced


def answer(args, model, tokenizer, prompt: list[int], turn: int, is_first: bool) -> list[int]:
    """Samples and prints an answer. -> its tokens, the end token last. is_first: nothing was said before the message.
    Raises BadInput when the prompt does not fit."""
    room = model.config.sequence_len - len(prompt)
    if room < 1:
        raise BadInput(f"the {'message' if is_first else 'conversation'} has {len(prompt)} tokens, the context "
                       f"{model.config.sequence_len}{'' if is_first else ': begin anew with clear'}")
    limit, speaker = min(args.max_new_tokens, room), Speaker(tokenizer)
    print("\nAssistant: ", end="", flush=True)
    out = generate(model, [prompt], 1, max_new_tokens=limit, stop_tokens=tokenizer.stop_tokens,
                   keys=[row_key(args.seed, turn)], temperature=args.temperature, top_k=args.top_k, tool=speaker)
    tokens = out.tokens[0].tolist()
    if not out.stopped[0]:
        speaker.say(tokens[-1])  # the tool is asked before the next token, so the last one was not shown
        print(f" [cut at {limit} tokens]", end="")
        return [*tokens, tokenizer.assistant_end]
    return [*tokens[:-1], tokenizer.assistant_end]


def verify(args, verifier, tokenizer, fmt: Format, problem: str, solution: str, num_steps: int) -> Verification:
    """The verifier's greedy judgment of a solution. Raises BadInput when it does not fit its context."""
    prompt = verifier_prompt(tokenizer, fmt, problem, solution)
    room = verifier.config.sequence_len - len(prompt)
    if room < 1:
        raise BadInput(f"problem and solution are {len(prompt)} tokens to the verifier, its context "
                       f"{verifier.config.sequence_len}")
    out = generate(verifier, [prompt], 1, max_new_tokens=min(args.max_new_tokens, room),
                   stop_tokens=tokenizer.stop_tokens, keys=[0], temperature=0)
    tokens, stopped = out.tokens[0].tolist(), bool(out.stopped[0])
    return parse_verification(fmt, tokenizer.decode(tokens[:-1] if stopped else tokens), num_steps, stopped)


def show_verdicts(fmt: Format, solution: str, verification: Verification, colour: bool) -> None:
    """Prints the solution's steps with the verifier's verdicts, then its final one and what its text lacks."""
    painted = lambda verdict: paint(WORDS[verdict], COLOURS[verdict], colour)
    steps = fmt.step_bodies(solution)
    for k, (step, verdict) in enumerate(zip(steps, aligned(verification.step_verdicts, len(steps)), strict=True), 1):
        print(f"  step {k}: {one_line(step)}  {painted(verdict)}")
    print(f"  verdict: {painted(verification.verdict)}")
    if verification.unmet:
        print(f"  (malformed: {', '.join(verification.unmet)})")


def choose_format(args, recorded: dict, where: str) -> Format | None:
    """How a message becomes a prompt: a task's format, or None for chat. Raises BadInput."""
    own = {name: recorded_value(recorded, name, "", where) for name in PROMPTS}
    fmt = with_prompts(FORMATS[args.format], own) if args.format in FORMATS else (
        None if args.format else format_of(recorded, where))
    if args.verifier and fmt is None:
        raise BadInput(f"--verifier {args.verifier}: a verifier judges steps, and chat has none: give --format "
                       f"{' or '.join(FORMATS)}")
    return fmt


def read_message() -> str | None:
    """The next message, None at the end of the conversation. Raises BadInput for what is no text."""
    try:
        said = input("\nUser: ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    except UnicodeDecodeError:
        raise BadInput("the input is not text in UTF-8") from None
    return None if said.lower() in ("quit", "exit") else said


def main(args) -> None:
    check_temperature("--temperature", args.temperature)
    tag = args.model_tag or default_tag(args.source)
    check_name("-g", tag)
    check_name("--verifier", args.verifier or tag)
    if args.prompt is not None and not args.prompt.strip():
        raise BadInput("-p: the message is empty")
    tokenizer = load_tokenizer(found_at("tokenizer"))
    device = init_device(args.device_type)
    model, recorded, where, step = load(args.source, tag, args.step, tokenizer, device, "generator")
    fmt, verifier = choose_format(args, recorded, where), None
    if args.verifier:
        stage = args.source if list_steps(args.source, args.verifier) else "sft"
        verifier, taught, where, _ = load(stage, args.verifier, -1, tokenizer, device, "verifier")
        fmt = with_prompts(fmt, {"verifier_prompt": recorded_value(taught, "verifier_prompt", "", where)})
    colour = wants_colour(args.colour)
    print(f"{found_at(args.source, tag)} at step {step}; "
          + (f"problems in the format {fmt.name}" if fmt else "chat"))
    history, messages, turn = [], [], 0  # of the conversation: tokens, and what was said
    while (said := read_message() if args.prompt is None else args.prompt) is not None:
        if args.prompt is None and said.lower() in ("clear", ""):
            history, messages = ([], []) if said else (history, messages)
            continue
        try:
            if fmt:
                prompt = generator_prompt(tokenizer, fmt, said)
            elif isinstance(tokenizer, HFTokenizer):  # a template of its own, which may say more than the turns
                prompt = tokenizer.render_chat([*messages, {"role": "user", "content": said}])
            else:
                prompt = history + tokenizer.render_prompt(said)[1 if history else 0:]
            tokens = answer(args, model, tokenizer, prompt, turn, not history)
            print()
            if fmt:  # every message is a problem of its own
                solution = read_solution(tokenizer, fmt, tokens)
                if verifier is not None:
                    verification = verify(args, verifier, tokenizer, fmt, said, solution.text, len(solution.step_ends))
                    show_verdicts(fmt, solution.text, verification, colour)
            else:
                history = prompt + tokens
                said_by_model = tokenizer.decode(tokens[:-1] if tokens[-1] in tokenizer.stop_tokens else tokens)
                messages += [{"role": "user", "content": said}, {"role": "assistant", "content": said_by_model}]
        except BadInput as error:
            if args.prompt is not None:
                raise
            print(f"\nerror: {one_line(error)}")
        except KeyboardInterrupt:  # an unwanted answer: the conversation goes on as if it had not been asked for
            if args.prompt is not None:
                raise
            print(" [stopped]")
        if args.prompt is not None:
            break
        turn += 1


if __name__ == "__main__":
    script_main(main, make_parser())
