"""
How well the tokenizer compresses text: bytes per token, beside tiktoken's encodings where they are on this machine.
Nothing is downloaded. An imported tokenizer is taken too.

    python -m scripts.tok_eval                                # five short built-in texts
    python -m scripts.tok_eval --data a.txt b.txt --compare cl100k_base
"""
import os
import time
from collections.abc import Callable

import tiktoken

from nanochat.cli import new_parser, not_empty, script_main
from nanochat.common import BadInput, print0
from nanochat.dataloader import tell_long
from nanochat.hf.tokenizer import HFTokenizer, load_tokenizer
from nanochat.storage.files import path_of, read_text
from nanochat.tokenizer import Tokenizer

SAMPLES = {
    "english": """The ferry left late that morning because the fog would not lift from the harbour. Nobody minded much: the baker's
daughter had brought two baskets of rolls, the postman read out the headlines, and an old man who had crossed the strait every week for
forty years explained, to whoever would listen, why gulls sleep on one leg.\n""",  # noqa: E501
    "code": '''def merge(left: list[int], right: list[int]) -> list[int]:
    """Two sorted lists as one."""
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]\n''',
    "latex": r"""\begin{proof} Let $S_n = \sum_{k=1}^{n} x^{k-1}$ with $x \neq 1$. Then $x S_n - S_n = x^n - 1$, so that
\[ S_n = \frac{x^n - 1}{x - 1}, \qquad \lim_{n \to \infty} S_n = \frac{1}{1 - x} \quad \text{for } |x| < 1. \] \end{proof}""" + "\n",  # noqa: E501
    "greek": "Το καράβι έφυγε αργά το πρωί, γιατί η ομίχλη δεν έλεγε να σηκωθεί από το λιμάνι. Κανείς δεν βιαζόταν: "
             "ο φούρναρης είχε φέρει ζεστό ψωμί και ο ταχυδρόμος διάβαζε δυνατά την εφημερίδα.\n",
    "numbers": "48/2=24, 48+24=72; 3.14159265, 2.71828183; 1,250,000 - 87,500 = 1,162,500; 2024-02-29 07:45:30; "
               "65537, 0x7f3a, 1e-05\n" * 2,
}


def make_parser():
    parser = new_parser(__doc__)
    parser.add_argument("--data", nargs="+", type=not_empty, default=[], metavar="FILE",
                        help="UTF-8 text files; default: the built-in texts")
    parser.add_argument("--compare", default="gpt2,cl100k_base",
                        help="tiktoken encodings, separated by commas; '' = none")
    return parser


def local_encoding(name: str) -> tiktoken.Encoding | None:
    """tiktoken's encoding of this name from its cache on disk; None where tiktoken would have to download it. Raises
    BadInput for an unknown name."""
    import tiktoken.load

    def refuse(path: str):
        raise FileNotFoundError(path)

    if name not in tiktoken.list_encoding_names():
        raise BadInput(f"--compare {name}: tiktoken has {', '.join(tiktoken.list_encoding_names())}")
    download, tiktoken.load.read_file = tiktoken.load.read_file, refuse  # what is asked when the cache has nothing
    try:
        return tiktoken.get_encoding(name)
    except FileNotFoundError:
        return None
    finally:
        tiktoken.load.read_file = download


def check_round_trip(tokenizer: Tokenizer | HFTokenizer, name: str, text: str) -> None:
    """Raises BadInput unless the bytes of the tokens are those of the text, or of the text after the space that an
    imported tokenizer may put first, as Llama 2's does."""
    before, after = text.encode(), b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
    if before != after and (isinstance(tokenizer, Tokenizer) or b" " + before != after):
        at = len(os.path.commonprefix([before, after]))
        raise BadInput(f"the tokenizer does not give back the text {name}: from byte {at} it has "
                       f"{after[at: at + 12]!r}, not {before[at: at + 12]!r}")


def compression_table(texts: dict[str, str], encoders: dict[str, Callable]) -> list[str]:
    """The lines of the table. encoders: name -> text to token ids, ours first; the others' last column is by how many
    percent ours has more tokens."""
    ours = next(iter(encoders))
    width = max(map(len, [*texts, "text"]))
    heads = [f" | {name:>13s} {'bytes/token':>11s}" + (f" {ours:>8s}" if name != ours else "") for name in encoders]
    lines = [f"{'text':{width}s} {'bytes':>9s}" + "".join(heads)]
    rows = [(name, len(text.encode()), [len(encode(text)) for encode in encoders.values()])
            for name, text in texts.items()]
    rows.append(("all", sum(size for _, size, _ in rows),
                 [sum(counts) for counts in zip(*(counts for _, _, counts in rows), strict=True)]))
    for name, size, counts in rows:
        cells = [f" | {count:13d} {size / count:11.2f}" + (f" {100 * (counts[0] / count - 1):+7.1f}%" if k else "")
                 for k, count in enumerate(counts)]
        lines.append(f"{name:{width}s} {size:9d}" + "".join(cells))
    return lines


def tokens_per_second(encode: Callable, texts: list[str], at_least: float = 0.1) -> float:
    """The speed of encoding the texts, over and over for `at_least` seconds."""
    num_tokens, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < at_least or num_tokens == 0:
        num_tokens += sum(len(encode(text)) for text in texts)
    return num_tokens / elapsed


def main(args) -> None:
    tokenizer = load_tokenizer(path_of("tokenizer"))
    texts = {path: read_text(path) for path in args.data} or SAMPLES
    if empty := [path for path, text in texts.items() if not text]:
        raise BadInput(f"--data {empty[0]}: is empty")
    encoders = {"ours": tokenizer.encode}
    for name in filter(None, args.compare.split(",")):
        encoding = local_encoding(name)
        if encoding is None:
            print0(f"{name}: not on this machine, left out; tiktoken downloads it where there is a network, to the "
                   f"folder $TIKTOKEN_CACHE_DIR")
        else:
            encoders[name] = encoding.encode_ordinary
    for name, text in texts.items():
        tell_long([name], [text])
        check_round_trip(tokenizer, name, text)
    print0("\n".join(compression_table(texts, encoders)))
    print0(f"ours: {tokenizer.vocab_size} ids, every text comes back whole, "
           f"{tokens_per_second(tokenizer.encode, list(texts.values())):,.0f} tokens/s")


if __name__ == "__main__":
    script_main(main, make_parser(), is_shown=True)
