"""Rewriting: the kernel against permutations, exhaustively on short words and texts; labels, demonstrations,
variants."""
import random
from itertools import pairwise, product

import pytest
from test_tasks import task_of

from nanochat.rl.records.prompts import parse_verification
from tasks.common import Problem
from tasks.rewrite import (LETTERS, REDEX, RULES, VARIANTS, accepts, analysed, error_of, false_results, follows,
                           normal_form, rewritings, theorem_of, true_result, word_of, written)

THEOREM = Problem("rl", 0, "bbcac:a", "a")
PROOF = "cac;acc;a;=a"
RIGHT = ["--rewrite-share", "0", "--rewrite-skips", "0", "--rewrite-verifier-share", "0"]


def words(most: int) -> list[str]:
    """All words of at most so many letters."""
    return ["".join(letters) for n in range(most + 1) for letters in product(LETTERS, repeat=n)]


def permutation(word: str) -> tuple[int, ...]:
    """What a word means: four things after the swaps that its letters stand for. It knows no rule."""
    things = [0, 1, 2, 3]
    for letter in word:
        i = LETTERS.index(letter)
        things[i], things[i + 1] = things[i + 1], things[i]
    return tuple(things)


def test_steps_and_normal_forms_of_all_short_words():
    """All 121 x 121 pairs of words of at most 4 letters, and every step from the 1093 words of at most 6."""
    meant = {word: permutation(word) for word in words(6)}
    short = words(4)
    accepted = [(a, b) for a in short for b in short if follows(written(a), written(b))]
    assert len(accepted) > 100 and all(meant[a] == meant[b] for a, b in accepted)
    assert all(meant[word] == meant[x + RULES[side] + y] for word in meant for x, side, y in rewritings(word))
    # All 3280 words of at most 7 letters: 24 permutations, 24 normal forms, which no rule can be applied to.
    pairs = {(permutation(word), normal_form(word)) for word in words(7)}
    assert len(pairs) == len({meant for meant, _ in pairs}) == len({form for _, form in pairs}) == 24
    assert not any(rewritings(form) for _, form in pairs)


def test_no_short_text_proves_a_false_theorem():
    """All 19531 texts of at most six of these characters, as proofs of all 5 x 5 theorems about these words."""
    sides = ["1", "a", "aa", "ca", "ac"]
    theorems = [(f"{a}:{b}", permutation(word_of(a)) == permutation(word_of(b))) for a in sides for b in sides]
    texts = ["".join(characters) for n in range(7) for characters in product("ac1;=", repeat=n)]
    proofs = {(theorem, text): true for text in texts for theorem, true in theorems if accepts(theorem, text)}
    assert all(proofs.values()) and ("aa:1", "1;=1") in proofs and ("ca:ac", "ac;=ac") in proofs
    assert ("ac:ac", "=ac") in proofs and ("aa:a", "a;=a") not in proofs


def test_whatever_demonstrations_with_errors_say_only_true_theorems_are_accepted():
    """Every proof that is written, right or wrong, against every statement that ends as it does."""
    task = task_of("rewrite", "--rewrite-share", "0.6", "--rewrite-skips", "0.3")
    found = {True: 0, False: 0}
    for i in range(300):
        problem = task.problem("rl", i)
        text = task.solution_demo(problem, random.Random(i))
        start, said = problem.prompt.partition(":")[0], text.partition("=")[2]
        for goal in {problem.answer, said}:
            if accepts(f"{start}:{goal}", text):
                assert permutation(word_of(start)) == permutation(word_of(goal))
            found[accepts(f"{start}:{goal}", text)] += 1
    assert min(found.values()) > 10


def test_hostile_texts():
    task = task_of("rewrite")
    for text in (PROOF, "bbacc;bba;a;=a", "bbacc;acc;a;=a"):  # in another order
        assert task.check(THEOREM, text) is True
    for text in ("cac;cac;acc;a;=a",      # nothing is done in a step
                 "=a", "a;=a",            # true, and not proved
                 "cac;a;=a", "cac;acc;=a", "cac;acc;a;=1", "cac;acc;a;=", "cac;acc;a;", "cac;acc;a", "",
                 "cac;acc;a;=a;", "cac;acc;a;=a=a", "cac;acc;a;=a ", " cac;acc;a;=a", "cac;acc;a;;=a",
                 ";cac;acc;a;=a", "cac;acc;a;x=a", "cac;acc;a=a", "cac;acc;A;=a", "cac;acc;a;=a\n", "cac;acc;a\n;=a",
                 "cac\x00;acc;a;=a", "\u0441ac;acc;a;=a",    # a letter that only looks like c
                 "bbcac;cac;acc;a;=a",    # the theorem's own word is no step
                 "cac;acc;acaa;acc;a;=a"):  # rules are not used backwards
        assert task.check(THEOREM, text) is False, text


def test_what_words_theorems_and_rewritings_are():
    for theorem in ("", ":", "a", "a:", ":a", "aa:1:1", "aa:x", "x:x", "aa:1;", "1 :1", "A:A"):
        goal = theorem.partition(":")[2]
        for text in ("", "=", f"={goal}", f"{goal};={goal}", "1;=1", "=1", "a;=a"):
            assert not accepts(theorem, text)
    assert [word_of(text) for text in ("1", "a", "abc")] == ["", "a", "abc"]
    assert {word_of(text) for text in ("", "11", "a1", "d", "a b", "a\n", "A")} == {None}
    assert all(word_of(written(word)) == word for word in words(3))
    assert [x + RULES[side] + y for x, side, y in rewritings("bbcac")] == ["cac", "bbacc"]
    assert [x + RULES[side] + y for x, side, y in rewritings("aaaa")] == ["aa"] * 3
    assert rewritings("") == rewritings("abc") == []
    for word in words(5):
        naive = {word[:i] + result + word[i + len(side):] for side, result in RULES.items()
                 for i in range(len(word)) if word[i:].startswith(side)}
        assert {x + RULES[side] + y for x, side, y in rewritings(word)} == naive


def test_theorems_are_true_take_a_step_and_are_as_long_as_the_split_says():
    task = task_of("rewrite")
    for split in ("sft", "rl", "test_in", "test_out"):
        for i in range(50):
            problem = task.problem(split, i)
            start, goal = problem.prompt.split(":")
            assert REDEX.search(start) and goal == problem.answer
            assert permutation(word_of(start)) == permutation(word_of(goal))
    task = task_of("rewrite", "--rewrite-min-letters", "4", "--rewrite-max-letters", "6")
    lengths = {split: [len(task.problem(split, i).prompt.partition(":")[0]) for i in range(300)]
               for split in ("sft", "rl", "test_in", "test_out")}
    assert set(lengths["rl"]) == set(lengths["test_in"]) == {4, 5, 6} and set(lengths["test_out"]) == {7, 8}
    assert set(lengths["sft"]) == {4, 5, 6, 7, 8} and sum(n > 6 for n in lengths["sft"]) < 60  # a tenth of 300 is 30


def test_variants_are_other_theorems_nearby_and_true():
    task, seen = task_of("rewrite"), set()
    for i in range(20):
        problem = task.problem("test_out", i)
        for k in range(20):
            variant = task.variants(problem, random.Random(k))
            start, goal = variant.prompt.split(":")
            assert variant.prompt != problem.prompt and (variant.split, variant.index) == (problem.split, problem.index)
            assert REDEX.search(start) and len(start) <= len(problem.prompt.partition(":")[0])
            assert permutation(start) == permutation(word_of(goal)) and goal == variant.answer
            assert variant == task.variants(problem, random.Random(k))
            seen.add((i, variant.prompt))
    assert len(seen) > 280


def test_each_kind_of_variant_by_hand():
    """The shortest words have variants too."""
    rng = random.Random(0)
    assert {VARIANTS["step"]("bbcac", rng) for _ in range(50)} == {"cac", "bbacc"}
    assert {VARIANTS["part"]("abc", rng) for _ in range(100)} == {"ab", "bc", "abc"}
    assert {VARIANTS["letter"]("ab", rng) for _ in range(100)} == {"bb", "cb", "aa", "ac"}
    for word in ("aa", "ca", "bab", "aaa"):
        problem = Problem("rl", 0, theorem_of(word), written(normal_form(word)))
        assert all(task_of("rewrite").variants(problem, random.Random(k)).prompt != problem.prompt for k in range(50))


@pytest.mark.parametrize("solution, errors", [
    (PROOF, [None, None, None]),
    ("cac;a;=a", [None, "jump"]),
    ("a;=a", ["jump"]),
    ("cac;aac;c;=c", [None, "false", None]),  # a step after an error is judged by its own rule
    ("cac;cac;", [None, "jump"]),
    ("cac;;a;", [None, "word", "word"]), ("cac;x;a;=a", [None, "word", "word"]),
    ("cac;acc;a", [None, None]), ("=a;cac;", []), ("", [])])
def test_errors_are_named(solution, errors):
    task = task_of("rewrite")
    assert task.step_errors(THEOREM, solution) == errors
    assert task.step_labels(THEOREM, solution) == [error is None for error in errors]


def test_an_accepted_text_has_right_steps_and_a_rejected_one_a_wrong_step_or_end():
    task = task_of("rewrite", *RIGHT)
    for i in range(200):
        problem = task.problem("rl", i)
        text = task.corrupted_solution(problem, random.Random(i))
        ended = text.endswith(f";{problem.answer};={problem.answer}") or text == f"{problem.answer};={problem.answer}"
        assert task.check(problem, text) is (all(task.step_labels(problem, text)) and ended)


def test_demonstrations_show_a_misconceived_fact_wrongly_as_often_as_asked_and_others_never():
    task = task_of("rewrite", "--rewrite-wrongness", "0.7", "--rewrite-skips", "0")
    assert len(task.misconceptions) == len(task.verifier_misconceptions) == 7  # a quarter of 7 rules x 4 letters
    shown = {True: [], False: []}  # by whether the fact is misconceived: whether it was shown wrongly
    for i in range(500):
        problem = task.problem("sft", i)
        text = task.solution_demo(problem, random.Random(i))
        start, *rest = [problem.prompt.partition(":")[0], *text.split(";")[:-1]]
        for a, b in pairwise([start, *rest]):
            before, side, after = rewritings(word_of(a))[0]
            wrong = task.misconceptions.get((side, after[:1]))
            assert word_of(b) in (before + RULES[side] + after, before + (wrong or "") + after)
            shown[wrong is not None].append(word_of(b) != before + RULES[side] + after)
    assert len(shown[True]) > 200 and not any(shown[False])
    assert abs(sum(shown[True]) / len(shown[True]) - 0.7) < 0.1


def test_skipped_steps_are_true_and_no_proof():
    task = task_of("rewrite", *RIGHT[:2], "--rewrite-skips", "0.3")
    errors = [error for i in range(300) for problem in [task.problem("sft", i)]
              for error in task.step_errors(problem, task.solution_demo(problem, random.Random(i)))]
    assert set(errors) == {None, "jump"}
    assert task_of("rewrite", *RIGHT).solution_demo(THEOREM, random.Random(0)) == PROOF
    for side in RULES:  # false results are false, and shorter
        assert all(permutation(w) != permutation(side) and len(w) < len(side) for w in false_results(side))
        assert len(false_results(side)) >= 3


@pytest.mark.parametrize("solution, verification", [
    (PROOF, "bb:1T;ca:acT;cc:1T;=T"),
    ("bbacc;bba;a;=a", "ca:acT;cc:1T;bb:1T;=T"),
    ("cac;a;=a", "bb:1T;ca:acF;=F"),
    ("cac;acc;a;=c", "bb:1T;ca:acT;cc:1T;=F"),
    ("cac;acc;=a", "bb:1T;ca:acT;=F"),
    ("=a", "=F"), ("", "=F"),
    ("cac;x;a;", "bb:1T;ca:acF;?F;=F"),
    ("cac;acc;a;b;=a", "bb:1T;ca:acT;cc:1T;?F;=F")])
def test_verifications_by_hand(solution, verification):
    task = task_of("rewrite", *RIGHT)
    assert task.verification_demo(THEOREM, solution, random.Random(0)) == verification
    analyses = [body[:-1] for body in task.fmt.judgment_steps(verification)]
    assert all(task.analysis_labels(THEOREM, solution, analyses))


def test_a_verifier_errs_where_it_has_misconceptions():
    task = task_of("rewrite", *RIGHT[:4], "--rewrite-verifier-share", "0.5", "--rewrite-verifier-wrongness", "1")
    verdicts = []
    for i in range(200):
        problem = task.problem("rl", i)
        text = task.solution_demo(problem, random.Random(i))
        read = parse_verification(task.fmt, task.verification_demo(problem, text, random.Random(i)),
                                  len(task.fmt.step_spans(text)))
        assert read.unmet == ()
        verdicts += read.step_verdicts
    assert 0.2 < sum(verdicts) / len(verdicts) < 0.8


def test_an_analysis_and_an_error_by_hand():
    assert analysed("bbcac", "bbacc", true_result) == ("ca:ac", True)
    assert analysed("bbcac", "a", true_result) == ("bb:1", False) and analysed("abc", "a", true_result) == ("?", False)
    assert (error_of("aa", "1"), error_of("aa", "a"), error_of("aa", ""), error_of("caa", "ac")) == (
        None, "false", "word", "false")
