"""
The complete checks of tasks.grading on GSM8K and MATH, and how many answers it grades in a second.

    python dev/check_grading.py ../shared/data

Prints: bad golds; every pair of a gold and the next row's that is True though the texts differ, or None; golds that
pass as ordinary and that math-verify cannot parse; answers graded per second; of each kind of neighbours, how many are
graded otherwise than they are. Takes minutes: math-verify needs tens of milliseconds for each of some thousand pairs.
"""
import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

from grading_neighbours import KINDS, neighbours

from tasks import grading
from tasks.answers import read, unspaced
from tasks.grading import compare, grade, is_ordinary, readable


def golds_of(folder: str, name: str, *files: str) -> list[str]:
    rows = [json.loads(line) for file in files
            for line in open(os.path.join(folder, name, f"{file}.jsonl"), encoding="utf-8")]
    return [row["answer"].rpartition("####")[2].strip() for row in rows]


def graded(pool, pairs: list[tuple[str, str]]) -> list[bool | None]:
    def verdict(pair: tuple[str, str]) -> bool | None:
        return grade(completion=pair[1] if "\\boxed" in pair[1] else f"\\boxed{{{pair[1]}}}", gold=pair[0])
    return list(pool.map(verdict, pairs))


def varied(gold: str, k: int) -> str:
    """The gold in another form."""
    left = f"\\left{gold}\\right" if gold[0] == "(" else gold
    forms = [gold, f"${gold}$", f"{gold}.", f"x = {gold}", gold.replace("frac", "dfrac"), left, gold.replace(" ", "")]
    return forms[k % len(forms)]


def main(folder: str):
    with ThreadPoolExecutor(4) as pool:
        for name, files in (("gsm8k", ("train", "test")), ("math", ("train", "test500"))):
            golds = golds_of(folder, name, *files)
            start = time.monotonic()
            bad = [gold for gold in golds if not readable(gold)]
            print(f"{name}: {len(golds)} golds, {len(bad)} bad: {bad} ({time.monotonic() - start:.1f} s)")
            golds = [gold for gold in golds if gold not in bad]

            pairs = [(gold, varied(gold, k)) for k, gold in enumerate(golds)]
            ordinary = [pair for pair in pairs if compare(*map(read, pair)) is not None]
            read.cache_clear()
            start = time.monotonic()
            wrong = [pair for pair, verdict in zip(ordinary, graded(pool, ordinary), strict=True)
                     if verdict is not True]
            print(f"{name}: {len(ordinary)} of {len(pairs)} varied forms need no worker, "
                  f"{len(ordinary) / (time.monotonic() - start):.0f}/s; not True: {wrong}")

            pairs = list(zip(golds, golds[1:] + golds[:1], strict=True))
            asked = sum(compare(*map(read, pair)) is None for pair in pairs)
            start = time.monotonic()
            verdicts = graded(pool, pairs)
            equal = {pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict is not False
                     and unspaced(pair[0]) != unspaced(pair[1])}
            print(f"{name}: next rows: {asked} of {len(pairs)} pairs to workers, {time.monotonic() - start:.1f} s; "
                  f"equal or None: {sorted(equal)}")

            bodies = sorted({grading.for_worker(reading) for reading in map(read, golds) if reading.value is None
                             and is_ordinary(reading.body)})
            print(f"{name}: {len(bodies)} ordinary formulas; not parsed: "
                  f"{[body for body in bodies if not grading.verified(body)]}")

        golds = list(dict.fromkeys(golds))
        print("neighbours | golds | right, not True | wrong, not False: True, None | which")
        for kind, make in KINDS.items():
            num_golds, rows = neighbours(golds, make)
            verdicts = graded(pool, [row[:2] for row in rows])
            found = {(right, verdict): [row[:2] for row, v in zip(rows, verdicts, strict=True)
                                        if row[2] is right and v is verdict]
                     for right in (True, False) for verdict in (True, False, None)}
            missed = found[True, False] + found[True, None]
            print(f"{kind} | {num_golds} | {len(missed)} of {sum(row[2] for row in rows)} | {len(found[False, True])}, "
                  f"{len(found[False, None])} of {sum(not row[2] for row in rows)} | {missed} {found[False, True]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="with gsm8k/train.jsonl, gsm8k/test.jsonl, math/train.jsonl, math/test500.jsonl")
    main(parser.parse_args().folder)
