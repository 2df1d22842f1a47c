"""The tasks chain and last_letter: problems, gold answers and step labels, misconceptions, verifications by hand."""
import random

import pytest
from test_tasks import ALWAYS_RIGHT, CHAIN, SPLITS, WORDS, task_of

from nanochat.common import BadInput
from nanochat.rl.records.prompts import parse_verification
from tasks.chain import STEP
from tasks.common import Problem


def test_variants_of_a_chain_differ_in_a_digit_or_an_operation_and_state_their_own_answer():
    task, seen = task_of("chain", "--chain-modulus", "3", *ALWAYS_RIGHT["chain"]), set()
    problem = Problem("test_in", 7, "1+2*1", "00")
    for k in range(100):
        variant = task.variants(problem, random.Random(k))
        assert sum(a != b for a, b in zip(variant.prompt, problem.prompt, strict=True)) == 1
        assert (variant.split, variant.index) == ("test_in", 7)
        assert task.check(variant, task.solution_demo(variant, random.Random(0)))
        seen.add(variant.prompt)
    assert seen == {"0+2*1", "2+2*1", "1-2*1", "1*2*1", "1+0*1", "1+1*1", "1+2+1", "1+2-1", "1+2*0", "1+2*2"}


def test_lengths_are_those_of_the_split():
    chain, letters = task_of("chain"), task_of("last_letter")
    lengths = {split: [len(chain.problem(split, i).prompt) // 2 for i in range(300)]  # "3+5*2" has 2 operations
               for split in SPLITS}
    assert set(lengths["rl"]) == set(lengths["test_in"]) == set(range(2, 9))
    assert set(lengths["test_out"]) == {9, 10}
    assert set(lengths["sft"]) == set(range(2, 11)) and sum(n > 8 for n in lengths["sft"]) < 60  # a tenth of 300 is 30
    problems = {split: [letters.problem(split, i).prompt.split() for i in range(300)] for split in SPLITS}
    num_words = {split: {len(words) for words in problems[split]} for split in SPLITS}
    num_letters = {split: {len(word) for words in problems[split] for word in words} for split in SPLITS}
    assert num_words["rl"] == num_words["test_in"] == set(range(2, 11)) and num_words["test_out"] == {11, 12}
    assert (num_letters["rl"] == num_letters["test_in"] == set(range(3, 11))
            and num_letters["test_out"] == set(range(3, 13)))


def test_the_full_length_share_of_last_letter_decides_how_many_sft_problems_are_long():
    short, all_full = (task_of("last_letter", "--last-letter-full-share", share) for share in ("0", "1"))
    words = [short.problem("sft", i).prompt.split() for i in range(300)]
    assert {len(w) for w in words} == {2, 3, 4, 5} and {len(x) for w in words for x in w} == set(range(3, 9))
    words = [all_full.problem("sft", i).prompt.split() for i in range(300)]
    assert {len(w) for w in words} == set(range(2, 13)) and {len(x) for w in words for x in w} == set(range(3, 13))
    half = task_of("last_letter", "--last-letter-full-share", "0.5")
    long = sum(len(half.problem("sft", i).prompt.split()) > 5 for i in range(600))
    assert abs(long / 600 - 0.5 * 7 / 11) < 0.08  # 6 to 12 are 7 of the 11 full lengths; four standard errors


def test_the_gold_answer_is_the_arithmetic_or_the_last_letters():
    every, last = (lambda results: "".join(map(str, results))), (lambda results: str(results[-1]))
    for flags, answer in (([], every), (["--chain-answer", "final"], last), (["--chain-modulus", "7"], every)):
        task = task_of("chain", *flags)
        for i in range(100):
            prompt = task.problem("rl", i).prompt
            results, value = [], int(prompt[0])
            for op, b in zip(prompt[1::2], prompt[2::2], strict=True):
                value = {"+": value + int(b), "-": value - int(b), "*": value * int(b)}[op] % task.modulus
                results.append(value)
            assert task.problem("rl", i).answer == answer(results), prompt
    for problem in map(task_of("last_letter").problem, ["rl"] * 100, range(100)):
        assert problem.answer == "".join(word[-1] for word in problem.prompt.split(" "))


def test_demonstrations_worked_by_hand():
    task = task_of("chain", *ALWAYS_RIGHT["chain"])
    for prompt, demo in {"3+5*2": "3+5:8;8*2:6;=86", "2-7*3": "2-7:5;5*3:5;=55",
                         "9*9+9-0": "9*9:1;1+9:0;0-0:0;=100"}.items():
        assert task.solution_demo(Problem("rl", 0, prompt, ""), random.Random(0)) == demo
    final = task_of("chain", "--chain-answer", "final", *ALWAYS_RIGHT["chain"])
    assert final.solution_demo(CHAIN, random.Random(0)) == "3+5:8;8*2:6;=6"
    assert task_of("last_letter").solution_demo(WORDS, random.Random(0)) == "grape:e;lemon:en;fig:eng;=eng"
    # with final answers a wrong chain can be right by luck, and its verification still says no
    problem, solution = Problem("rl", 0, "3+5*0", "0"), "3+5:9;9*0:0;=0"
    assert final.check(problem, solution) is True and final.step_labels(problem, solution) == [False, True]
    assert final.verification_demo(problem, solution, random.Random(0)) == "3+5:8F;9*0:0T;=F"


def test_the_outcome_is_the_answer():
    chain, words = task_of("chain"), task_of("last_letter")
    for solution in ("3+5:8;8*2:6;=86", "=86", "3+5:8;8*2:6;=86 \n"):  # space around the answer is free
        assert chain.check(CHAIN, solution) is True
    for answer in ("=6", "=086", "=86=86", "86", "="):
        assert chain.check(CHAIN, f"3+5:8;8*2:6;{answer}") is False
    assert chain.check(CHAIN, "") is chain.check(CHAIN, "3+5:9;9*2:8;=98") is False
    assert words.check(WORDS, "grape:e;lemon:en;fig:eng;=eng") is words.check(WORDS, "nonsense;= eng") is True
    for answer in ("=en", "=ENG", "=eng;", ""):
        assert words.check(WORDS, f"grape:e;lemon:en;fig:eng;{answer}") is False
    assert words.check(WORDS, "=") is words.check(WORDS, "") is False


HOSTILE_CHAIN = [
    ("3+5:8;8*2:6;=86", [True, True]), ("3+5:8;8*2:7;=87", [True, False]),
    ("3+5:9;8*2:6;=86", [False, False]),            # the second does not copy the result before it
    ("3+5:8;8+2:0;=80", [True, False]), ("3+5:8;8*3:4;=84", [True, False]),  # another operation, another operand
    ("8*2:6;3+5:8;=86", [False, False]), ("3+5:8;=8", [True]),  # out of order, a step is missing
    ("3+5:8;8*2:6;6+1:7;=867", [True, True, False]), ("3+5:8;3+5:8;8*2:6;=86", [True, False, False]),
    ("nonsense;8*2:6;=86", [False, False]), ("nonsense;3*2:6;=6", [False, False]),  # no result to carry on
    ("3+5:18;=18", [False]),                        # not reduced modulo 10
    ("3+5 :8; 8*2:6;=86", [False, False]),
    ("3+5:8T;8*2:6T;=T", [False, False]), ("3+5:8|2;=86", [False]),  # a verification is no solution
    ("3+5:8;8*2:6", [True]),                        # the last step is not closed
    ("3+5:8=8;8*2:6;", []), ("=86;3+5:8;8*2:6;", []),  # steps after an answer do not count
    (";;", [False, False]), ("3+5:;:8;", [False, False]), ("3+5:-2;", [False]), ("", []),
    ("3+5:9;9*2:8;=98", [False, True]), ("3+5:9;9*2:9;=99", [False, False]),  # after an error, by its own operation
    *((solution, [False]) for solution in ("\u0663+5:8;", "03+5:8;", "3+5:08;", "3+5:" + "8" * 5000 + ";")),
]
HOSTILE_WORDS = [
    ("grape:e;lemon:en;fig:eng;=eng", [True, True, True]),
    ("grape:e;lemon:em;fig:emg;=emg", [True, False, False]),    # an error carried on stays wrong
    ("grape:e;lemon:em;fig:eng;=eng", [True, False, True]),     # unlike one that is mended
    ("grape:a;lemon:n;fig:g;=g", [False, False, False]),
    ("grape:e;lemn:en;fig:eng;=eng", [True, False, True]),      # the word is not copied
    ("lemon:n;grape:ne;fig:neg;=neg", [False, False, False]),   # out of order
    ("grape:e;=e", [True]), ("grape:e;fig:eg;=eg", [True, False]),  # steps are missing
    ("grape:e;lemon:en;fig:eng;fig:engg;=engg", [True, True, True, False]),
    ("grape:e;grape:e;lemon:en;=en", [True, False, False]), ("grape:E;LEMON:en;", [False, False]),
    ("grape: e;lemon:en ;\nfig:eng;", [False, False, False]), ("e;en;eng;=eng", [False, False, False]),
    ("grape:eT;lemon:enT;fig:engT;=T", [False, False, False]), ("grape:e|3;", [False]), ("grape:e:e;", [False]),
    ("grape:e;lemon:en", [True]), ("grape:e;lemon:en=;fig:eng;", [True]), ("=eng;grape:e;", []),
    (";;;;", [False] * 4), ("", []),
]


def test_steps_are_right_iff_they_copy_what_was_there_and_compute_well():
    """Of last letter: iff they give the word and the letters so far."""
    for name, problem, table in (("chain", CHAIN, HOSTILE_CHAIN), ("last_letter", WORDS, HOSTILE_WORDS)):
        task = task_of(name)
        for solution, labels in table:
            assert task.step_labels(problem, solution) == labels, solution[:40]
    long = Problem("rl", 0, "1+1+1+1", "234")
    assert task_of("chain").step_labels(long, "1+1:3;3+1:4;4+1:6;=346") == [False, True, False]


def test_misconceptions_are_the_asked_share_of_the_facts_and_the_roles_have_their_own():
    task = task_of("chain", "--chain-share", "0.4", "--chain-verifier-share", "0.2")
    assert len(task.misconceptions) == 120 and len(task.verifier_misconceptions) == 60  # of 10 * 3 * 10 facts
    for (a, op, b), wrong in (task.misconceptions | task.verifier_misconceptions).items():
        assert wrong in range(10) and wrong != {"+": a + b, "-": a - b, "*": a * b}[op] % 10
    # Drawn independently: 120 * 60 / 300 = 24 facts in both, give or take three standard errors.
    assert abs(len(set(task.misconceptions) & set(task.verifier_misconceptions)) - 24) < 11


@pytest.mark.parametrize("share,num_common", [("1", 60), ("0.5", 30), ("0", 0)])
def test_the_verifier_has_a_share_of_its_misconceptions_from_the_generator(share, num_common):
    flags = ["--chain-share", "0.4", "--chain-verifier-share", "0.2"]
    task, alone = task_of("chain", *flags, "--chain-common-share", share), task_of("chain", *flags)
    known, own = task.misconceptions.items(), alone.verifier_misconceptions.items()
    found = task.verifier_misconceptions.items()
    assert task.misconceptions == alone.misconceptions and len(found) == 60
    assert len(found & known) >= num_common and len(found & own) >= 60 - num_common
    assert found <= known | own
    if not num_common:
        assert found == own


def test_the_verifier_cannot_have_more_of_the_generators_misconceptions_than_there_are():
    flags = ["--chain-share", "0.1", "--chain-verifier-share", "0.2", "--chain-common-share"]
    with pytest.raises(BadInput, match="--chain-common-share 1.0: .* --chain-share 0.1"):
        task_of("chain", *flags, "1")
    task_of("chain", *flags, "0.5")


def test_demonstrations_show_a_misconceived_fact_wrongly_as_often_as_asked_and_others_never():
    task = task_of("chain", "--chain-wrongness", "0.75")
    shown = {True: [], False: []}  # by whether the fact is misconceived: whether each showing was wrong
    for i in range(500):
        problem = task.problem("sft", i)
        solution = task.solution_demo(problem, random.Random(i))
        for (start, end), right in zip(task.fmt.step_spans(solution), task.step_labels(problem, solution), strict=True):
            a, op, b, result = STEP.fullmatch(task.fmt.step_body(solution[start:end])).groups()
            wrong = task.misconceptions.get((int(a), op, int(b)))
            assert right or int(result) == wrong  # one fixed wrong result
            shown[wrong is not None].append(not right)
    assert len(shown[True]) > 600 and len(shown[False]) > 1200 and not any(shown[False])
    assert abs(sum(shown[True]) / len(shown[True]) - 0.75) < 0.05


def test_corrupted_chains_have_errors_of_arithmetic_only():
    task = task_of("chain")
    labels = []
    for i in range(100):
        problem = task.problem("rl", i)
        solution = task.corrupted_solution(problem, random.Random(i))
        labels += task.step_labels(problem, solution)
        value = problem.prompt[0]
        for (start, end), op, b in zip(task.fmt.step_spans(solution), problem.prompt[1::2], problem.prompt[2::2],
                                       strict=True):
            assert solution[start:end].startswith(f"{value}{op}{b}:")
            value = solution[end - 2]
    assert 0.05 < labels.count(False) / len(labels) < 0.3  # most steps stay right


@pytest.mark.parametrize("name, solution, verification", [
    ("chain", "3+5:8;8*2:6;=86", "3+5:8T;8*2:6T;=T"),
    ("chain", "3+5:9;9*2:8;=98", "3+5:8F;9*2:8T;=F"),
    ("chain", "3+5:8;8*2:6;=85", "3+5:8T;8*2:6T;=F"),             # right steps, wrong answer
    ("chain", "3+5:8;=8", "3+5:8T;=F"),                           # too few steps
    ("chain", "3+5:8;8*2:6;6+0:6;=866", "3+5:8T;8*2:6T;?F;=F"),   # too many
    ("chain", "3+5:8;=86", "3+5:8T;=F"),                          # the right answer does not make up for it
    ("chain", "3+5:9;9*2:8;=86", "3+5:8F;9*2:8T;=F"),
    ("chain", "nonsense", "=F"),
    ("chain", "3+5:8T;=T", "?F;=F"),                              # a forged judgment
    ("last_letter", "grape:e;lemon:en;fig:eng;=eng", "grape:eT;lemon:enT;fig:engT;=T"),
    ("last_letter", "grape:e;lemon:em;fig:emg;=emg", "grape:eT;lemon:enF;fig:engF;=F"),
    ("last_letter", "grape:e;lemon:en;fig:eng;=en", "grape:eT;lemon:enT;fig:engT;=F"),
    ("last_letter", "grape:e;lemon:en;=en", "grape:eT;lemon:enT;=F"),
    ("last_letter", "grape:e;lemon:en;fig:eng;:eng;=eng", "grape:eT;lemon:enT;fig:engT;?F;=F"),
    ("last_letter", "grape:e;lemon:en;=eng", "grape:eT;lemon:enT;=F"),
    ("last_letter", "grape:e;lemon:em;fig:eng;=eng", "grape:eT;lemon:enF;fig:engT;=F"),
    ("last_letter", "", "=F"),
    ("last_letter", "grape:eT;=T", "grape:eF;=F"),
])
def test_verifications_written_by_hand(name, solution, verification):
    problem = {"chain": CHAIN, "last_letter": WORDS, "mixture": CHAIN}[name]
    assert task_of(name, *ALWAYS_RIGHT[name]).verification_demo(problem, solution, random.Random(0)) == verification


@pytest.mark.parametrize("name, flags, rate", [
    ("chain", ["--chain-share", "0", "--chain-verifier-share", "0.4",
               "--chain-verifier-wrongness", "0.5"], 0.2),  # 0.4 * 0.5
    ("last_letter", ["--last-letter-verifier-error", "0.2"], 0.2),
    ("chain", ["--chain-share", "0", "--chain-verifier-share", "1", "--chain-verifier-wrongness", "1"], 1),
])
def test_the_verifier_errs_on_right_steps_as_often_as_asked(name, flags, rate):
    task = task_of(name, *flags)
    verdicts = []
    for i in range(300):
        problem = task.problem("rl", i)
        solution = task.solution_demo(problem, random.Random(i))
        text = task.verification_demo(problem, solution, random.Random(i))
        verdicts += parse_verification(task.fmt, text, len(task.fmt.step_spans(solution))).step_verdicts
    assert len(verdicts) > 1300 and abs(verdicts.count(False) / len(verdicts) - rate) < 0.04


def write_words(path, words) -> str:
    path.write_text("\n".join(words))
    return str(path)


def many_words(count: int, num_letters: int) -> list[str]:
    rng = random.Random(num_letters)
    return ["".join(rng.choices("abcdefghijklm", k=num_letters)) + "xyz"[i % 3] for i in range(count)]


def test_last_letter_takes_its_words_from_the_file(tmp_path):
    short, long, longest = many_words(150, 4), many_words(20, 9), many_words(20, 11)  # of 5, 10 and 12 letters
    unusable = ["no", "it's", "two words", "caf\u00e9", "Grape;", "x" * 13, "", "a1b2c3"]
    path = write_words(tmp_path / "words.txt", [word.title() + " " for word in short + long + longest] + unusable)
    task = task_of("last_letter", "--last-letter-words", path)
    words = {split: {word for i in range(300) for word in task.problem(split, i).prompt.split()} for split in SPLITS}
    assert words["rl"] == words["test_in"] == set(short + long)
    assert words["test_out"] == set(short + long + longest)
    assert words["sft"] <= set(short + long + longest) and words["sft"] & set(longest)
    only_short = task_of("last_letter", "--last-letter-words", path, "--last-letter-full-share", "0")
    assert {word for i in range(300) for word in only_short.problem("sft", i).prompt.split()} <= set(short)


def test_a_words_file_with_under_100_usable_words_is_bad_input(tmp_path):
    words = many_words(100, 5)
    assert len(set(words)) == 100
    enough = write_words(tmp_path / "enough.txt", words)
    assert task_of("last_letter", "--last-letter-words", enough).words is not None
    # 99 words, one of them twice, and many that are too long for the short problems of SFT
    few = write_words(tmp_path / "few.txt", words[:99] + words[:1] + many_words(200, 9))
    with pytest.raises(BadInput, match=f"--last-letter-words {few}: has 99 words of 3 to 8 letters"):
        task_of("last_letter", "--last-letter-words", few)
    (tmp_path / "words.bin").write_bytes(bytes(range(256)) * 100)
    with pytest.raises(BadInput, match="has 0 words"):
        task_of("last_letter", "--last-letter-words", str(tmp_path / "words.bin"))
