"""
What goes wrong: every kind of fault, and the tests that hold its outcome. Where a module has tests of its own for a
fault they stand there; here are the table and the faults of whole runs.

    python -m pytest tests/test_faults.py
"""
import ast
import functools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import datasets
import huggingface_hub
import pytest
import torch
from conftest import ONE, RL_FLAGS, on_two_ranks, parse, rl_flags

from nanochat import core_eval

from nanochat.checkpoint import load_meta
from nanochat.common import BadInput, Diverged
from nanochat.dataloader import open_rows
from nanochat.hf.files import find_folder, read_json
from nanochat.hf.tokenizer import load_tokenizer, parse_json
from nanochat.rl.learn import trainer
from nanochat.rl.report import report
from nanochat.rl.run.progress import health_warnings
from nanochat.rl.run.resume import read_config
from nanochat.storage import files
from nanochat.storage.run import claim_run_name, lock_run
from scripts import tango_rl
from tasks.common import read_table
from tasks.conversations import load_conversations
from test_tango_rl import ROOT, records, weights

# Every kind of fault, and the tests that hold what then happens.
ROWS = {
    "a continued run equals a straight one bit for bit, in every phase and recipe": [
        "tests/test_tango_rl.py::test_resume_continues_bit_for_bit",
        "tests/test_tango_rl.py::test_resume_goes_on_bit_for_bit_over_the_ends_of_epochs",
        "tests/test_tango_rl.py::test_resume_at_the_last_step_trains_nothing_and_reports_the_same",
        "tests/test_tango_rl.py::test_a_verifier_on_the_generators_trunk_trains_and_resumes",
        "tests/test_tango_rl.py::test_posterior_step_rewards_learn_trust_and_resume_bit_for_bit",
        "tests/test_recipes.py::test_a_continued_run_is_a_straight_one_bit_for_bit",
        "tests/test_qwen.py::test_resume_continues_bit_for_bit_also_with_activations_kept",
        "tests/test_sharding.py::test_a_sharded_run_goes_on_from_a_save_and_two_machines_are_as_one",
        "tests/test_chat_sft.py::test_a_stopped_run_goes_on_to_the_same_weights",
        "tests/test_base_train.py::test_a_resumed_run_equals_an_uninterrupted_one",
    ],
    "kill -9 at each write of a save": [
        "tests/test_damage.py::test_a_kill_at_any_write_of_a_save_leaves_whole_sets",
        "tests/test_damage.py::test_a_save_writes_four_files_each_whole_or_not_at_all",
        "tests/test_damage.py::test_a_record_that_was_cut_by_a_kill_is_none",
        "tests/test_writer.py::test_sigkill_while_a_set_is_written_leaves_the_one_before",
    ],
    "the disk is full at each write of a save": [
        "tests/test_damage.py::test_a_full_disk_at_any_write_of_a_save_is_one_line_and_loses_nothing",
        "tests/test_damage.py::test_a_run_on_a_full_disk_says_what_is_whole",
        "tests/test_writer.py::test_a_disk_that_fills_up_in_the_background_stops_the_run_in_one_line",
        "tests/test_writer.py::test_a_set_counts_once_all_ranks_have_written_and_never_where_one_could_not",
        "tests/test_disk_full.py::test_a_full_disk_is_told_in_one_line_and_leaves_what_was_there",
        "tests/test_disk_full.py::test_a_folder_that_cannot_be_made_is_told_in_one_line",
        "tests/test_disk_full.py::test_the_text_of_a_recipe_that_cannot_be_written_is_told_in_one_line",
    ],
    "an old checkpoint cannot be removed, or is needed": [
        "tests/test_writer.py::test_a_file_that_cannot_be_removed_is_told_counted_and_tried_again",
        "tests/test_writer.py::test_what_this_start_or_another_run_began_with_is_kept",
        "tests/test_writer.py::test_the_last_sets_are_kept_and_an_older_one_goes_once_a_newer_one_is_whole",
    ],
    "a file is cut or has flipped bits": [
        "tests/test_damage.py::test_a_flipped_bit_anywhere_is_refused_or_changes_nothing",
        "tests/test_damage.py::test_a_damaged_file_of_a_set_is_named",
        "tests/test_damage.py::test_a_file_of_another_step_is_noticed",
        "tests/test_damage.py::test_a_damaged_config_is_one_line",
        "tests/test_damage.py::test_garbage_between_records_is_one_line_that_says_where",
        "tests/test_checkpoint.py::test_a_damaged_file_is_refused_by_name",
    ],
    "a file is missing": [
        "tests/test_tango_rl.py::test_resume_with_a_file_missing_is_an_error_that_names_it",
        "tests/test_checkpoint.py::test_an_absent_file_is_named",
        "tests/test_checkpoint.py::test_a_model_without_its_meta_does_not_count",
        "tests/test_checkpoint.py::test_a_missing_optimizer_is_named",
    ],
    "another world size": [
        "tests/test_sharding.py::test_a_sharded_run_goes_on_from_a_save_and_two_machines_are_as_one",
        "tests/test_base_train.py::test_two_ranks_go_on_together_and_no_other_number_can",
        "tests/test_chat_sft.py::test_two_ranks_go_on_from_one",
        "tests/test_bad_input.py::test_world_size_must_divide_the_problems",
    ],
    "a malicious pickle, pt or json": [
        "tests/test_tokenizer.py::test_a_malicious_pickle_is_refused_and_runs_nothing",
        "tests/test_checkpoint.py::test_a_hostile_file_is_refused_and_runs_nothing",
        "tests/test_faults.py::test_malicious_json_is_refused_in_one_line_that_names_the_file",
    ],
    "a malicious chat template": [
        "tests/test_hf_tokenizer.py::test_bad_templates_are_refused_in_one_line",
        "tests/test_hf_tokenizer.py::test_a_template_that_takes_all_time_or_memory_is_refused",
        "tests/test_hf_tokenizer.py::test_a_template_that_waits_for_a_message_before_it_takes_them_is_refused_too",
        "tests/test_hf_tokenizer.py::test_the_process_that_renders_loads_no_torch_and_ends_with_its_parent",
    ],
    "a number is none, on one rank or on all": [
        "tests/test_trainer.py::test_two_gloo_ranks_equal_one",
        "tests/test_trainer.py::test_a_step_that_is_not_finite_moves_nothing",
        "tests/test_damage.py::test_weights_that_are_not_finite_are_refused_at_load",
        "tests/test_damage.py::test_weights_that_are_not_finite_are_neither_evaluated_nor_saved",
        "tests/test_damage.py::test_a_healthy_role_does_not_hide_one_whose_steps_are_skipped",
        "tests/test_damage.py::test_supervised_training_saves_no_weights_that_are_not_finite",
        "tests/test_damage.py::test_pretraining_neither_saves_nor_evaluates_weights_that_are_not_finite",
        "tests/test_faults.py::test_a_loss_that_is_no_number_on_one_rank_moves_no_rank_and_stops_all",
        "tests/test_tango_rl.py::test_three_updates_that_are_not_finite_stop_the_run",
    ],
    "SIGTERM in rollout, verification, update, evaluation, save and start-up": [
        "tests/test_tango_rl.py::test_sigterm_saves_one_set_and_the_next_run_goes_on",
        "tests/test_tango_rl.py::test_sigterm_in_a_save_lets_it_end_and_stops_after_it",
        "tests/test_writer.py::test_sigterm_while_a_set_is_written_saves_it_and_the_last_step",
        "tests/test_trainer.py::test_a_stop_is_looked_for_before_every_micro_batch",
        "tests/test_tango_rl.py::test_sigterm_at_start_up_saves_nothing_and_the_next_run_starts_afresh",
        "tests/test_tango_rl.py::test_sigterm_before_the_run_is_open_ends_the_process_and_leaves_nothing",
        "tests/test_tango_rl.py::test_sigterm_in_the_last_evaluation_keeps_the_last_set",
        "tests/test_tango_rl.py::test_sigterm_to_torchrun_saves_on_two_ranks",
    ],
    "ranks with unequal work": [
        "tests/test_trainer.py::test_two_gloo_ranks_equal_one",
        "tests/test_sharding.py::test_three_sharded_ranks_take_the_steps_of_one",
        "tests/test_dpo.py::test_a_rank_without_pairs_takes_part_in_the_step_of_the_others",
        "tests/test_prime.py::test_a_rank_without_rollouts_has_empty_advantages",
        "tests/test_recipes.py::test_two_ranks_do_what_one_does",
    ],
    "a rank dies": [
        "tests/test_faults.py::test_when_a_rank_dies_all_end_and_the_last_set_stays",
    ],
    "torchrun itself dies": [
        "tests/test_faults.py::test_ranks_whose_torchrun_was_killed_save_and_end",
        "tests/test_common.py::test_a_rank_whose_torchrun_has_ended_before_it_does_not_wait_for_it",
    ],
    "weights drift between ranks": [
        "tests/test_faults.py::test_weights_that_drift_between_ranks_are_noticed_before_they_are_saved",
    ],
    "hostile strings for the grader, in threads and under load": [
        "tests/test_grading_hostile.py::test_no_hostile_answer_is_true",
        "tests/test_grading_hostile.py::test_other_spellings_of_right_answers_are_true",
        "tests/test_grading.py::test_no_hostile_answer_takes_longer_than_its_budget",
        "tests/test_grading.py::test_eight_threads_share_the_workers",
        "tests/test_grading.py::test_a_timeout_is_none_is_not_remembered_and_replaces_the_worker",
        "tests/test_grading.py::test_a_worker_that_dies_at_work_gives_none_and_the_next_answer_is_right",
        "tests/test_grading.py::test_a_worker_out_of_memory_gives_none_long_before_its_time",
    ],
    "the golden table of rewards": [
        "tests/test_rewards.py::test_an_outcome_is_one_or_zero_at_the_last_token_and_none_abstains",
        "tests/test_rewards.py::test_the_verdict_reward_is_agreement_plus_gamma_times_format",
        "tests/test_rewards.py::test_class_weights_by_hand",
        "tests/test_rewards.py::test_chances_are_those_of_bayes",
        "tests/test_advantages.py::test_grpo_golden",
    ],
    "bombs for the calculator": [
        "tests/test_calculator.py::test_work_is_bounded",
        "tests/test_calculator.py::test_nothing_is_run_as_code",
        "tests/test_calculator.py::test_threads_may_calculate",
    ],
    "hostile texts of a verifier": [
        "tests/test_prompts.py::test_parsing_is_total_and_unmet_says_exactly_what_is_missing",
        "tests/test_prompts.py::test_no_beginning_of_a_verification_counts_as_whole",
        "tests/test_prompts.py::test_text_after_the_final_judgment_is_not_well_formed",
        "tests/test_demo.py::test_what_a_model_writes_cannot_steer_the_terminal",
        "tests/test_page.py::test_text_of_models_is_never_markup",
    ],
    "forged verdicts and tags in problems, solutions, proposed problems and observations": [
        "tests/test_prompts.py::test_a_forged_judgment_is_quoted_without_its_marks",
        "tests/test_prompts.py::test_a_verifier_prompt_holds_the_marks_of_its_template"
        "_and_no_special_token_whatever_it_quotes",
        "tests/test_prompts.py::test_a_generator_prompt_holds_no_special_token_but_its_frame_whatever_stands_in_it",
        "tests/test_tokenizer.py::test_special_strings_in_a_conversation_stay_text",
        "tests/test_hf_tokenizer.py::test_no_text_changes_the_number_of_control_tokens",
        "tests/test_processbench.py::test_the_verifier_is_told_of_every_step_and_of_no_more_whatever_they_hold",
        "tests/test_tools.py::test_the_calculators_output_is_forced_after_its_call",
    ],
    "batches that are over-long, empty, all cut or all equal": [
        "tests/test_engine.py::test_a_prompt_that_does_not_fit_is_refused_by_name",
        "tests/test_engine.py::test_no_rows",
        "tests/test_faults.py::test_texts_that_are_all_empty_or_all_cut_earn_nothing_and_the_run_goes_on",
        "tests/test_trainer.py::test_equal_rewards_give_no_gradient",
        "tests/test_dpo.py::test_without_a_pair_there_is_no_update",
        "tests/test_recipes.py::test_a_step_without_an_update_is_counted_and_the_run_goes_on",
    ],
    "bad flags": [
        "tests/test_bad_input.py::test_the_trainer_refuses",
        "tests/test_bad_input.py::test_flags_are_never_abbreviated_or_guessed",
        "tests/test_bad_input.py::test_exit_code_of_the_process_is_2",
        "tests/test_bad_input.py::test_bad_input_of_one_rank_alone_is_its_line_and_no_traceback_of_the_others",
        "tests/test_bad_flags.py::test_every_flag_is_taken_or_refused_in_one_line",
        "tests/test_bad_flags.py::test_every_flag_of_every_recipe_is_taken_or_refused_in_one_line",
        "tests/test_bad_flags.py::test_any_name_of_a_recipe_is_taken_or_refused_in_one_line",
    ],
    "sizes that no memory holds": [
        "tests/test_own_task.py::test_sizes_that_no_memory_holds_are_refused_with_the_number",
        "tests/test_own_task.py::test_a_stop_is_looked_for_while_problems_are_built",
    ],
    "mistakes of a task, and a checkpoint of another one": [
        "tests/test_own_task.py::test_a_tasks_mistake_ends_a_script_with_one_line",
        "tests/test_own_task.py::test_a_task_that_can_score_nothing_is_warned_of_once_and_the_run_goes_on",
        "tests/test_own_task.py::test_splits_that_share_problems_are_warned_of",
        "tests/test_own_task.py::test_a_checkpoint_of_another_task_is_refused_unless_the_task_is_said",
        "tests/test_own_task.py::test_a_checkpoint_of_other_problems_is_refused_unless_they_are_said",
    ],
    "no network": [
        "tests/test_faults.py::test_nothing_is_looked_for_on_the_network",
        "tests/test_faults.py::test_a_hub_that_cannot_be_reached_is_tried_once",
        "tests/test_tango_rl.py::test_wandb_offline_needs_no_network",
        "tests/test_hf_files.py::test_a_hub_that_gives_nothing_is_one_line",
    ],
    "a constant verifier": [
        "tests/test_faults.py::test_a_constant_verifier_is_warned_of_before_the_run",
        "tests/test_evals.py::test_a_constant_judge_has_balanced_accuracy_one_half",
        "tests/test_tango_rl.py::test_a_lenient_verifier_is_warned_of",
    ],
    "two processes on one run, one base directory, one cache of kernels": [
        "tests/test_tango_rl.py::test_two_processes_never_work_on_one_run",
        "tests/test_faults.py::test_two_processes_in_one_base_directory_have_a_run_each_and_do_the_same",
        "tests/test_faults.py::test_a_dummy_name_that_two_processes_chose_is_the_first_ones",
        "tests/test_cpu_kernels.py::test_two_processes_compile_once_and_leave_one_file",
        "tests/test_task_text.py::test_two_calls_on_one_folder_do_not_disturb_each_other",
    ],
}


@functools.cache
def functions_of(path: str) -> set[str]:
    """The names of the functions of a file."""
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return {node.name for node in ast.parse(f.read()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS)
def test_every_fault_has_tests_and_they_exist(row):
    assert ROWS[row]
    for test in ROWS[row]:
        path, _, name = test.partition("::")
        assert name in functions_of(path), test


# Ranks and torchrun that die

@pytest.fixture
def two_ranks(base):
    """A run on two ranks that would go on for long, after its third step; and the processes of its ranks. All of them
    are gone after the test."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               "scripts/tango_rl.py", "--", *RL_FLAGS, "--run", "r", "--save-every", "2", "--num-steps", "1000"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)
    for line in process.stdout:
        if line.startswith("step    2"):
            break
    ranks = children(process.pid)
    yield process, ranks
    for pid in (process.pid, *ranks):
        if is_there(pid):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def children(pid: int) -> list[int]:
    """The processes that a process started, in their order."""
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return [int(word) for word in f.read().split()]


def is_there(pid: int) -> bool:
    """Whether a process is at work: not gone, and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float = 60) -> bool:
    """Whether a condition comes true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def last_saved(base) -> int:
    return max(int(name[6:12]) for name in os.listdir(base / "runs" / "r") if name.startswith("state_"))


def assert_run_is_free(base) -> None:
    """Nobody holds its lock, and its last set is whole."""
    lock_run(str(base / "runs" / "r")).close()
    saved = last_saved(base)
    assert torch.load(base / "runs" / "r" / f"state_{saved:06d}.pt", weights_only=True)["step"] == saved
    assert weights(base, "r", saved)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the request comes from Linux")
def test_ranks_whose_torchrun_was_killed_save_and_end(base, two_ranks):
    process, ranks = two_ranks
    assert len(ranks) == 2
    process.kill()
    assert wait_until(lambda: not any(map(is_there, ranks)))
    assert_run_is_free(base)
    assert last_saved(base) == len(records(base, "r")) >= 3


def test_when_a_rank_dies_all_end_and_the_last_set_stays(base, two_ranks):
    process, ranks = two_ranks
    os.kill(ranks[1], signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode != 0 and not any(map(is_there, ranks))
    assert_run_is_free(base)


# What goes wrong on one rank

def drift(monkeypatch) -> None:
    """Rank 1's generator moves by a last bit after its first update."""
    apply_update = tango_rl.apply_update

    def drifting(t, update):
        metrics = apply_update(t, update)
        if update.role == "generator" and t.run.rank == 1:
            weight = t.roles["generator"].model.lm_head.weight.data
            weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
        return metrics
    monkeypatch.setattr(tango_rl, "apply_update", drifting)


def poison(monkeypatch) -> None:
    """Rank 1's losses are no numbers."""
    loss = trainer.linear_policy_loss

    def poisoned(*args, **kwargs):
        total, logprobs, entropy = loss(*args, **kwargs)
        return (total * float("nan") if os.environ["RANK"] == "1" else total), logprobs, entropy
    monkeypatch.setattr(trainer, "linear_policy_loss", poisoned)


def run_with_faults(folder: str) -> None:
    """What each fault's run ends with on this rank, into <folder>/<rank>.json."""
    ends = {}
    for fault in (drift, poison):
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            try:
                tango_rl.main(parse(tango_rl, rl_flags("--run", fault.__name__, "--save-every", "2")))
            except Diverged as error:
                ends[fault.__name__] = str(error)
    with open(f"{folder}/{os.environ['RANK']}.json", "w") as f:
        json.dump(ends, f)


@pytest.fixture(scope="module")
def faults_of_rank_1(sft_base, tmp_path_factory):
    """The base directory and what each fault's run ended with, rank by rank."""
    base = tmp_path_factory.mktemp("faults") / "base"
    shutil.copytree(sft_base, base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(base))
        on_two_ranks(run_with_faults, str(base))
    return base, [json.loads((base / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_weights_that_drift_between_ranks_are_noticed_before_they_are_saved(faults_of_rank_1):
    """The generator's first update is that of step 2, after the warm-up; step 4 would be saved."""
    base, ends = faults_of_rank_1
    for end in ends:
        assert end["drift"].startswith("step 4: the weights of the generator are no longer the same on all ranks "
                                       "(lm_head.weight)")
    assert [name for name in os.listdir(base / "runs" / "drift") if name.startswith("state")] == ["state_000002.pt"]


def test_a_loss_that_is_no_number_on_one_rank_moves_no_rank_and_stops_all(faults_of_rank_1):
    base, ends = faults_of_rank_1
    assert all("not finite three times in a row" in end["poison"] for end in ends)
    log = records(base, "poison")
    assert [r.get("gen/skipped", r.get("ver/skipped")) for r in log] == [1] * len(log)
    for role, tag in (("gen", "tiny"), ("ver", "tiny-ver")):
        saved, start = (torch.load(base / path, weights_only=True) for path in (
            f"chatrl_checkpoints/poison-{role}/model_000002.pt", f"chatsft_checkpoints/{tag}/model_000200.pt"))
        assert all(torch.equal(saved[name], start[name]) for name in start)


# Several processes, no network

WATCHED = """
import os, sys
def watch(event, args):
    if event == "socket.getaddrinfo" and args[0] not in LOCAL or (
            event == "socket.connect" and isinstance(args[1], tuple) and args[1][0] not in LOCAL):
        print("NETWORK", event, args[-1], args[0], file=sys.stderr, flush=True)
        raise OSError("no network")
LOCAL = (None, "", "localhost", "127.0.0.1", "::1")
sys.addaudithook(watch)
from conftest import TASK_FLAGS, parse, rl_flags
for name in ("WANDB_MODE", "HF_HUB_OFFLINE"):  # which conftest sets
    os.environ.pop(name, None)
from scripts import chat_sft, tango_rl
chat_sft.main(parse(chat_sft, ["--role", "generator", *TASK_FLAGS, "--device-type", "cpu", "--model-tag", sys.argv[1],
                               "--depth", "1", "--n-embd", "64", "--n-head", "2", "--sequence-len", "128",
                               "--max-new-tokens", "28", "--num-steps", "2", "--num-sampled", "4"]))
tango_rl.main(parse(tango_rl, rl_flags("--num-steps", "1", "--warmup-steps", "0")))
"""


@pytest.fixture(scope="module")
def two_processes(sft_base, tmp_path_factory):
    """What SFT and a dummy run say in each of two processes that work in one base directory at the same time."""
    base = tmp_path_factory.mktemp("shared") / "base"
    shutil.copytree(sft_base, base)
    env = {**os.environ, "NANOCHAT_BASE_DIR": str(base), "OMP_NUM_THREADS": "1",
           "PYTHONPATH": os.pathsep.join([ROOT, os.path.join(ROOT, "tests")])}
    processes = [subprocess.Popen([sys.executable, "-c", WATCHED, tag], env=env, cwd=ROOT, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True) for tag in ("one", "two")]
    return base, [(*process.communicate(timeout=200), process.returncode) for process in processes]


def test_nothing_is_looked_for_on_the_network(two_processes):
    """SFT, evaluation and RL, with wandb and the hub as they are by default; the name of a dummy run sends none to
    wandb."""
    for _, err, code in two_processes[1]:
        assert code == 0 and "NETWORK" not in err, err[-2000:]


ASKED = {"a table": lambda: read_table("owner/name", (), "owner/name", split="train"),
         "text": lambda: open_rows(["owner/name"]), "conversations": lambda: load_conversations(["owner/name"]),
         "a model": lambda: find_folder("owner/name")}


@pytest.mark.parametrize("asked", ASKED)
def test_a_hub_that_cannot_be_reached_is_tried_once(monkeypatch, capsys, asked):
    """And whoever asks it is told so, with no library's own attempts."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    tried = []

    def fail(host, *args, **kwargs):
        tried.append(host)
        raise OSError(101, "Network is unreachable")
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    files.look_for_hub.cache_clear()
    for _ in range(2):
        with pytest.raises(BadInput, match="owner/name"):
            ASKED[asked]()
    files.look_for_hub.cache_clear()
    assert tried == ["huggingface.co"]
    assert capsys.readouterr().out.count("WARNING: huggingface.co cannot be reached (Network is unreachable)") == 1


def test_two_processes_in_one_base_directory_have_a_run_each_and_do_the_same(two_processes):
    base, said = two_processes
    assert sorted(os.listdir(base / "runs")) == ["dummy-1", "dummy-2"]
    one, two = (records(base, run) for run in ("dummy-1", "dummy-2"))
    assert one == two and len(one) == 1
    assert {"dummy-1", "dummy-2"} == {name for out, _, _ in said for name in ("dummy-1", "dummy-2")
                                      if f"run {name} in " in out}


def test_a_dummy_name_that_two_processes_chose_is_the_first_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    chosen = iter(["dummy-1", "dummy-1", "dummy-2"])
    monkeypatch.setattr("nanochat.storage.run.choose_run_name", lambda name: next(chosen))
    assert [claim_run_name("dummy"), claim_run_name("dummy")] == ["dummy-1", "dummy-2"]
    assert sorted(os.listdir(tmp_path / "runs")) == ["dummy-1", "dummy-2"]


# Malicious json

def config_of_run(path) -> dict:
    path.rename(path.parent / "config.json")
    return read_config(path.parent.name)


JSON_READERS = {
    "a model's meta": lambda path: load_meta(str(path)), "a run's configuration": config_of_run,
    "a run's records": lambda path: files.read_records(str(path)),
    "a report's file": lambda path: report.read_json(str(path)),
    "an imported model's configuration": lambda path: read_json(str(path)),
    "an imported tokenizer's configuration": lambda path: parse_json(str(path), path.read_bytes()),
    "conversations": lambda path: load_conversations([str(path)]),
    "examples of CORE": lambda path: core_eval.read_items(str(path), "multiple_choice"),
}
BAD_JSON = {"deep lists": b"[" * 10 ** 5, "deep objects": b'{"step":' * 10 ** 5, "a long number": b"1" * 10 ** 5,
            "an object with a long number": b'{"step": ' + b"1" * 10 ** 5 + b"}", "half an object": b'{"step": 1',
            "no text": b'{"step": "\xff\xfe"}', "nothing but zeros": b"\0" * 100}


@pytest.mark.parametrize("content", BAD_JSON)
@pytest.mark.parametrize("reader", JSON_READERS)
def test_malicious_json_is_refused_in_one_line_that_names_the_file(tmp_path, monkeypatch, reader, content):
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    (folder / "bad.json").write_bytes(BAD_JSON[content] + b"\n")
    with pytest.raises(BadInput, match="bad.json|config.json") as error:
        JSON_READERS[reader](folder / "bad.json")
    assert "\n" not in str(error.value) and len(str(error.value)) < len(str(tmp_path)) + 300


# Batches and verifiers that teach nothing

def say_nothing(base, recipe: str) -> list[str]:
    """Both models end every text at once."""
    end = load_tokenizer(str(base / "tokenizer")).stop_tokens[0]
    for path in (base / "chatsft_checkpoints").glob("*/model_*.pt"):
        state = torch.load(path, weights_only=True)
        state["lm_head.weight"][end, ONE] = 100.0
        torch.save(state, path)
    return []


def cut_all(base, recipe: str) -> list[str]:
    return ["--max-new-tokens", "1", *(["--verifier-max-new-tokens", "1"] if recipe == "tango" else [])]


@pytest.mark.parametrize("recipe", ["tango", "dpo", "prime"])
@pytest.mark.parametrize("fault, is_cut", [(say_nothing, 0), (cut_all, 1)])
def test_texts_that_are_all_empty_or_all_cut_earn_nothing_and_the_run_goes_on(base, recipe, fault, is_cut):
    """All rewards of a group are equal then; what is logged is finite or missing."""
    flags = rl_flags("--recipe", recipe, "--run", "r", "--num-steps", "2", *fault(base, recipe))
    tango_rl.main(parse(tango_rl, flags))
    log = records(base, "r")
    for record in log:
        assert all(math.isfinite(x) for x in record.values() if isinstance(x, int | float))
    assert len(log) >= 2
    drawn = [record for record in log if "gen/completions/clipped_ratio" in record]
    assert {record["gen/completions/clipped_ratio"] for record in drawn} <= {is_cut}
    assert all(record["gen/reward"] == record["gen/reward_std"] == 0 for record in log if "gen/reward" in record)


@pytest.mark.parametrize("judged, is_warned", [
    ({"pred_pos_rate": 1.0, "balanced_acc": 0.5}, True), ({"pred_pos_rate": 0.0, "balanced_acc": 0.5}, True),
    ({"pred_pos_rate": 0.4, "balanced_acc": 0.5}, True), ({"pred_pos_rate": 1.0, "balanced_acc": None}, True),
    ({"pred_pos_rate": 0.4, "balanced_acc": 0.6}, False), ({}, False)])
def test_a_constant_verifier_is_warned_of_before_the_run(judged, is_warned):
    sampled = {"pass@1": 0.5, "end_token_rate": 1.0}
    warnings = health_warnings(sampled, {"parse_fail": 0.0, **judged}, 0.0, torch.float32)
    assert [warning.startswith("the verifier is constant") for warning in warnings] == [True] * is_warned
