"""
Writes what is made from code and curves: dev/flags.md, dev/recipes.md and, between its two markers, the table of
recipes in README.md. Nothing is trained. tests/test_generated_pages.py compares all three with what is there.

    python dev/make_pages.py
"""
import argparse
import csv
import functools
import importlib
import os
import pkgutil
import re
import shlex
import textwrap
from statistics import mean
from typing import NamedTuple

import scripts
from nanochat import recipes
from nanochat.common import BadInput, flag_defaults, parse_flags, print0, script_main
from nanochat.rl.learn.heads import is_joint
from nanochat.rl.learn.roles import head_of
from nanochat.rl.records.prompts import DEMOS, template_of
from nanochat.rl.report.report import ACCURACY, Run, at_equal_tokens, change, filled, interval, spread
from nanochat.rl.verify.forms import form_of
from scripts import tango_rl
from tasks import add_task_args, make_task

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WIDTH = 120
BEGIN, END = "<!-- recipes: written by dev/make_pages.py -->", "<!-- end of recipes -->"
WRITTEN = "Written by `python dev/make_pages.py`. Do not edit it by hand."
STEP_F1 = "ver/step_f1_fixed"
GENERATED = ("chain", "lookup", "halves", "rewrite", "last_letter")  # tasks that need no files


# What was run, and what is checked

class Arm(NamedTuple):
    """The runs of an arm, one per seed."""
    curves: str             # a csv below dev/curves, without its ending
    name: str               # of the arm in it
    rate: str               # learning rate of the generator, or of the verifier where that alone is trained
    what: str               # in words
    baseline: str = "grpo"  # arm of the same csv that it is compared with; "" = none


COMMANDS = {  # how the runs of a csv were made
    "chain": "bash dev/experiments/fig4.sh",
    "merged/chain": 'bash dev/experiments/fig4.sh '
                    '--arms "grpo tango fixed_verifier tango_merged fixed_merged gold_steps"',
    "systems/chain": 'bash dev/experiments/fig4.sh --arms "grpo prime_2e-4 dpo spin"',
    "systems/chain_refine": 'bash dev/experiments/fig4.sh --start refine --arms "grpo_2e-4 critique_grpo_2e-4"'}
BESIDE = {  # a part of results.md -> recipes that are compared there, on another task
    "Verifiers of every kind": ("orm", "prm", "genrm", "genprm", "critic_rm", "gram", "supervisor", "rm_r1", "think_rm",
                                "think_rm_policy", "spct"),
    "Reward models that learn with the policy": ("cooper", "ppo", "refit", "progress_rewards", "simulated_judge"),
    "Two turns, many players, no labels": (
        "multi_agent_evolve", "ssp", "medvlsynther", "magrpo", "marti", "debate", "self_rewarding", "constitutional_ai",
        "coverrl", "self_verify", "search_r1", "r1_searcher", "ssrl", "mars", "alphaproof", "dapo", "debate_judge",
        "critique_grpo_verifier", "ttrl")}
DEFAULTS, PAPERS = "default step rewards", "the paper's step rewards"
RESULTS = {  # in the order of the pages; the README has the first arm of each recipe
    "grpo": [Arm("chain", "grpo", "4e-4", "GRPO", "")],
    "tango": [Arm("merged/chain", "tango_merged", "2e-4", DEFAULTS), Arm("chain", "tango", "2e-4", PAPERS)],
    "fixed_verifier": [Arm("merged/chain", "fixed_merged", "2e-4", DEFAULTS),
                       Arm("chain", "fixed_verifier", "2e-4", PAPERS)],
    "fixed_generator": [Arm("chain", "fixed_generator", "1e-4", "the verifier alone", "")],
    "outcome_verifier": [Arm("chain", "outcome_verifier", "2e-4", "final verdicts")],
    "gold_steps": [Arm("chain", "gold_steps", "2e-4", "gold step labels")],
    "prime": [Arm("systems/chain", "prime_2e-4", "2e-4", "process rewards")],
    "dpo": [Arm("systems/chain", "dpo", "4e-4", "pairs")],
    "spin": [Arm("systems/chain", "spin", "3e-5", "SFT's demonstrations")],
    "critique_grpo": [Arm("systems/chain_refine", "critique_grpo_2e-4", "2e-4", "two attempts", "grpo_2e-4")],
    "score": [],
    **{name: [] for names in BESIDE.values() for name in names}}


def anchor(title: str) -> str:
    """The link to a part of a page."""
    return title.lower().replace(",", "").replace(" ", "-")


NOT_COMPARED = ("score", "fixed_generator")
RATE_SEEN = "The rate was set after a look at these seeds, so the figures are not independent of it."
NOTES = {  # whole sentences
    "fixed_generator": "The generator does not learn, so its pass@1 is not compared. The rate is the verifier's, which "
                       "had 60 updates, one more than Tango's.",
    "outcome_verifier": "Run with `--no-verify-distinct`, which is not the default.",
    "gold_steps": "Run with the paper's `--combine advantages`, which is not the default.",
    "prime": "Run with `--prm-lr 3e-5 --process-norm none --accuracy-filter 0.05 0.95`, which are not the defaults. "
             + RATE_SEEN,
    "critique_grpo": "Both arms start from a second SFT, which teaches the form of a second attempt. Without it no "
                     "second attempt was right (0 of 256 sampled). " + RATE_SEEN,
    "score": "One seed, so it is not compared. Its figures are in [tuning.md](tuning.md#score-corrects-nothing).",
    **{name: f"Its figures are in [results.md](results.md#{anchor(part)})." for part, names in BESIDE.items()
       for name in names}}
STEPS = ["test_rewards.py::test_a_step_reward_is_plus_or_minus_one_over_the_number_of_steps",
         "test_advantages.py::test_grpo_is_eq_4_to_7", "test_advantages.py::test_tango_blend_by_hand"]
VERDICTS = ["test_rewards.py::test_the_verdict_reward_is_agreement_plus_gamma_times_format",
            "test_rewards.py::test_class_weights_by_hand"]
PLACES = ["test_log_odds.py::test_an_update_is_the_gradient_of_the_mean_cross_entropy_over_places"]
CHECKS = {  # tests that hold a recipe against its paper
    "grpo": ["test_advantages.py::test_grpo_golden", "test_losses.py::test_ppo_golden",
             "test_losses.py::test_kl_estimators_by_hand", "test_losses.py::test_aggregations_by_hand"],
    "tango": [*STEPS, *VERDICTS, "test_schedules.py::test_three_to_one_behind_a_warm_up"],
    "fixed_verifier": [*STEPS, "test_judges.py::test_a_chance_is_the_share_of_duels_won_and_equal_texts_draw"],
    "fixed_generator": VERDICTS,
    "outcome_verifier": ["test_tango_rl.py::test_outcome_verifier_rewards_the_final_verdict_and_no_step", *VERDICTS],
    "gold_steps": STEPS,
    "prime": ["test_prime.py::test_the_papers_baseline_is_the_mean_of_the_others_mean_rewards",
              "test_prime.py::test_the_advantage_is_the_sum_of_both_returns_whitened",
              "test_prime.py::test_the_prms_update_is_the_gradient_of_its_cross_entropy"],
    "dpo": ["test_dpo.py::test_the_update_takes_the_gradient_of_the_papers_loss"],
    "spin": ["test_spin.py::test_the_update_takes_the_gradient_of_the_papers_loss",
             "test_spin.py::test_an_iteration_begins_with_the_loss_log_2_against_a_snapshot"],
    "debate": ["test_debate.py::test_with_a_target_of_1_the_soft_loss_is_dpos",
               "test_debate.py::test_a_pair_is_drawn_to_where_its_margin_says_what_the_target_does",
               "test_debate.py::test_a_step_takes_the_gradient_of_the_papers_loss",
               "test_debate.py::test_the_scores_of_two_questions_by_hand"],
    "debate_judge": ["test_debate.py::test_a_judge_that_learns_is_paid_for_the_side_with_the_right_answer"],
    "critique_grpo": ["test_critique_grpo.py::test_shaped_coefficients_are_the_gradient_of_the_papers_loss",
                      "test_critique_grpo.py::test_the_update_sees_the_refinement_behind_the_problem_alone"],
    "critique_grpo_verifier": [
        "test_critique_grpo.py::test_with_a_verifier_its_text_is_the_critique_and_only_the_generator_moves"],
    "dapo": ["test_dapo.py::test_batches_are_drawn_until_there_are_as_many_mixed_groups_as_wanted",
             "test_dapo.py::test_no_group_that_is_trained_on_is_without_an_advantage",
             "test_dapo.py::test_the_length_penalty_falls_to_minus_1_over_the_buffer"],
    "score": ["test_score_recipe.py::test_rewards_of_both_turns_by_hand",
              "test_score_recipe.py::test_one_update_on_two_turns_is_the_gradient_of_the_loss"],
    "ttrl": ["test_ttrl.py::test_a_vote_earns_1_for_the_majority_answer",
             "test_ttrl.py::test_no_gold_answer_enters_an_update"],
    "coverrl": ["test_coverrl.py::test_both_sides_of_a_vote_are_verified_equally_often",
                "test_coverrl.py::test_a_label_stays_if_most_verdicts_are_for_it",
                "test_coverrl.py::test_verifications_of_one_answer_are_a_group",
                "test_coverrl.py::test_no_gold_answer_enters_an_update"],
    "self_verify": ["test_self_verify.py::test_the_turns_are_as_the_docstring_says",
                    "test_self_verify.py::test_both_kinds_of_steps_move_the_one_model_and_count_as_its_steps",
                    "test_rewards.py::test_the_verdict_reward_is_agreement_plus_gamma_times_format"],
    "alphaproof": ["test_rewrite.py::test_no_short_text_proves_a_false_theorem",
                   "test_rewrite.py::test_no_step_between_short_words_is_accepted_that_is_false",
                   "test_alphaproof.py::test_expert_iteration_is_the_cross_entropy_of_the_found_proofs",
                   "test_alphaproof.py::test_a_proved_target_is_left_alone_and_so_are_its_variants"],
    "orm": ["test_supervised.py::test_an_orm_learns_the_outcome_where_it_is_asked",
            "test_supervised.py::test_an_orm_goes_on_to_model_right_solutions", *PLACES],
    "prm": ["test_supervised.py::test_a_prm_learns_each_steps_label_behind_the_step",
            "test_supervised.py::test_labels_can_be_made_hard_and_end_with_the_first_error",
            "test_supervised.py::test_progress_is_learned_as_half_of_1_and_it", *PLACES],
    "genrm": ["test_supervised.py::test_a_genrm_learns_the_verdicts_token_and_may_learn_to_solve"],
    "genprm": ["test_supervised.py::test_a_genprm_learns_the_analyses_whose_verdicts_agree_with_the_labels",
               "test_judges.py::test_judges_that_write_average_over_their_texts_and_a_missing_verdict_counts_a_half"],
    "critic_rm": ["test_critic_rm.py::test_the_update_is_the_gradient_of_both_losses",
                  "test_critic_rm.py::test_with_lambda_0_it_is_genprm_on_the_same_critiques",
                  "test_critic_rm.py::test_with_lambda_1_only_the_verdicts_of_paired_critiques_move"],
    "gram": ["test_gram.py::"
             "test_the_smoothed_cross_entropy_is_the_bradley_terry_loss_and_half_of_epsilon_times_the_margin",
             "test_gram.py::test_the_choice_takes_the_gradient_of_the_smoothed_cross_entropy_over_both_choices",
             "test_gram.py::test_pretraining_models_both_solutions_behind_the_problem",
             "test_gram.py::test_a_generator_earns_the_chance_to_be_chosen_over_its_greedy_solution"],
    "supervisor": ["test_supervisor.py::test_a_supervisor_learns_the_answers_tokens_alone",
                   "test_supervisor.py::test_gains_telescope_and_are_those_of_label_steps"],
    "rm_r1": ["test_comparing.py::test_rm_r1_pays_1_for_the_right_choice_and_minus_1_for_all_else",
              "test_comparing.py::test_every_place_comes_equally_often_up_to_one"],
    "think_rm": ["test_comparing.py::test_think_rm_pays_1_for_the_exact_grade_and_a_half_for_the_sign",
                 "test_comparing.py::test_the_true_grade_counts_wrong_steps"],
    "think_rm_policy": ["test_comparing.py::test_difference_advantages_by_hand",
                        "test_comparing.py::test_on_differences_of_rewards_they_are_grpos_z_scores",
                        "test_think_rm_policy.py::test_the_policy_learns_the_differences_of_every_pair"],
    "multi_agent_evolve": ["test_proposals.py::test_a_problem_of_low_quality_has_no_difficulty",
                           "test_proposals.py::test_each_role_is_whitened_by_itself",
                           "test_proposals.py::test_no_gold_answer_enters_an_update_unless_it_is_asked_for"],
    "ssp": ["test_proposals.py::test_rewards_by_the_share_of_right_solutions",
            "test_ssp.py::test_a_question_passes_with_two_queries_that_are_enough",
            "test_ssp.py::test_a_step_by_hand",
            "test_ssp.py::test_without_the_filter_what_nobody_can_answer_pays_most"],
    "medvlsynther": ["test_medvlsynther.py::test_a_problem_passes_with_an_answer_and_the_score",
                     "test_medvlsynther.py::test_a_wrong_key_that_passes_is_learned"],
    "spct": ["test_comparing.py::test_spct_pays_for_the_strictly_highest_score",
             "test_comparing.py::test_votes_are_added_up_and_ties_stay_wrong"],
    "magrpo": ["test_magrpo.py::test_returns_on_a_table_of_two_by_two",
               "test_magrpo.py::test_one_agent_has_its_reward_less_the_groups_mean",
               "test_magrpo.py::test_an_update_is_the_gradient_of_the_loss_by_hand"],
    "marti": ["test_marti.py::test_shaped_rewards_at_the_corners",
              "test_marti.py::test_what_a_debate_earns_by_hand",
              "test_marti.py::test_what_a_chain_earns_by_hand"],
    "constitutional_ai": [
        "test_constitutional_ai.py::test_a_critique_is_the_first_step_that_breaks_the_principle",
        "test_constitutional_ai.py::test_what_is_learned_are_the_revisions_behind_the_problem_alone",
        "test_constitutional_ai.py::test_a_reward_is_the_mean_preference_over_the_others_of_the_group"],
    "self_rewarding": ["test_self_rewarding.py::test_points_of_a_judgment",
                       "test_self_rewarding.py::test_the_best_and_the_worst_of_a_group_are_a_pair",
                       "test_self_rewarding.py::test_no_gold_answer_enters_an_update"],
    "cooper": ["test_cooper.py::test_the_pairs_update_takes_the_gradient_of_the_papers_loss",
               "test_cooper.py::test_where_no_solution_is_accepted_the_reward_model_learns_nothing"],
    "ppo": ["test_ppo.py::test_with_lambda_1_the_critic_takes_the_gradient_of_the_cross_entropy_of_outcomes",
            "test_ppo.py::test_with_lambda_0_the_critic_learns_what_it_says_of_the_next_token",
            "test_ppo.py::test_each_solution_has_a_lambda_of_its_own_and_the_critic_keeps_its",
            "test_ppo.py::test_right_solutions_become_likelier_by_the_mean_over_their_tokens"],
    "refit": ["test_refit.py::test_the_verifier_takes_the_gradient_of_the_cross_entropy_of_outcomes_at_its_places",
              "test_refit.py::test_the_policy_earns_its_outcomes_and_the_chances"],
    "progress_rewards": ["test_progress_rewards.py::test_step_values_by_hand",
                         "test_progress_rewards.py::test_with_alpha_0_the_outcomes_alone_reward"],
    "simulated_judge": [
        "test_simulated_judge.py::test_a_right_solution_is_ranked_above_a_wrong_one_as_often_as_ties_and_flips_say",
        "test_simulated_judge.py::test_ties_are_of_whole_problems_and_flips_of_texts_and_both_are_the_same_each_time"],
    "search_r1": ["test_search.py::test_information_is_forced_behind_a_closed_query",
                  "test_search.py::test_what_the_search_wrote_gets_no_gradient",
                  "test_search_recipes.py::test_without_the_mask_information_is_trained_as_what_nobody_drew"],
    "r1_searcher": ["test_search_recipes.py::"
                    "test_stage_1_pays_the_search_and_the_form_and_the_answer_only_if_told",
                    "test_search_recipes.py::test_stage_2_pays_the_answer_less_a_penalty_for_its_form"],
    "ssrl": ["test_search_recipes.py::test_ssrl_pays_nine_tenths_for_the_answer_and_one_for_the_form",
             "test_search_recipes.py::test_what_ssrl_masks_gets_no_gradient"],
    "mars": ["test_mars.py::test_first_fit_decreasing_by_hand",
             "test_mars.py::test_either_system_is_normalised_over_its_own_samples",
             "test_mars.py::test_drawing_samples_changes_no_advantage"]}

STATUS = {  # works: its check passed; runs: its formulas are tested, its check did not pass, or was not made
    "grpo": "works: the baseline",
    "tango": "works: ahead of GRPO at equal steps, shown on three seeds",
    "fixed_verifier": "works: ahead of GRPO at equal steps, shown on three seeds",
    "fixed_generator": "works: step F1 rises on every seed",
    "outcome_verifier": "runs: no gain over GRPO is shown",
    "gold_steps": "works: the upper bound of the others",
    "prime": "runs: what process rewards add to outcomes is not shown",
    "dpo": "works: it learns, behind GRPO at equal tokens",
    "spin": "works: it stays at the fixed point that its demonstrations are",
    "debate": "works: debaters win more on three seeds; that the judge gets righter with them is not shown",
    "debate_judge": "runs: that its judge gets righter is not shown, on three seeds",
    "critique_grpo": "runs: no use of a refinement is shown at equal tokens",
    "critique_grpo_verifier": "runs: at GRPO's tokens it is behind on three seeds, at equal steps that is not shown",
    "dapo": "works: every group has signal, it is ahead of GRPO at equal steps and behind at equal tokens",
    "score": "runs: its second turn corrects nothing here",
    "constitutional_ai": "works: broken principles fall from 83 to 22% on three seeds, pass@1 rises without an answer",
    "self_rewarding": "runs: it gains in its first iteration on three seeds and loses that in the next two, as it "
                      "forgets how to judge",
    "ttrl": "works: where the majority is right sampled pass@1 rises on six seeds and greedy pass@1 falls; where it is "
            "wrong sampled pass@1 falls",
    "coverrl": "works: where wrong answers have the majority it learns on three seeds, and TTRL does not",
    "self_verify": "works: verifying lifts solving on three seeds, and not the reverse; turns are not shown to pay",
    "prm": "works: on gold labels the best judge of all kinds, on three seeds; as a reward it was gamed on one of them",
    "orm": "runs: best of 8 is above the majority vote, and it ranks solutions (AUC 63); no gain as a reward is shown",
    "genrm": "works: best of 8 beats the majority vote on three seeds; no gain as a reward is shown",
    "genprm": "works: step F1 rises on three seeds, and as a reward it is shown ahead of GRPO",
    "cooper": "runs: its frozen arm is gamed on three seeds, Cooper at most mildly, but it is behind the rule on two",
    "ppo": "runs: as GRPO or behind it in two settings of three seeds each; its critics explain little",
    "refit": "runs: as GRPO on three seeds, no use of the refitted verifier is shown",
    "simulated_judge": "runs: at equal accuracy the judge with more ties taught better, where slower was expected",
    "think_rm": "runs: RL leaves it where SFT did on three seeds, at 56% of pairs",
    "rm_r1": "works: RL raises the pairs judged rightly from 56 to 75% on three seeds",
    "spct": "runs: 8 votes are better than one on three seeds; no gain from RL is shown, and none from the meta filter",
    "multi_agent_evolve": "runs: it learns without an answer for 30 steps on three seeds, then collapses on one",
    "ssp": "works: the solver gains on three seeds, and without the filter it does not, as in the paper",
    "medvlsynther": "differs: without images; its filter keeps better keys on three seeds, and no gain of it is shown",
    "critic_rm": "runs: it finds more first errors on two seeds of three, its verdicts on steps get worse",
    "gram": "runs: it judges pairs about as well as chance on three seeds",
    "supervisor": "runs: its gains find errors about as an ORM does on three seeds, far behind Monte-Carlo labels",
    "progress_rewards": "runs: no gain over GRPO on three seeds at six times its tokens, its prover being as weak as "
                        "the policy",
    "think_rm_policy": "runs: it learns where its judge judges, which is on one seed of three",
    "magrpo": "works: the agents find one convention on three seeds, and with a frozen partner they do not",
    "marti": "runs: behind GRPO at equal tokens on three seeds; last answers are no better than first ones",
    "alphaproof": "works: proofs rise from 38 to 92% on three seeds, and no reward can be had without one",
    "search_r1": "works: ahead of GRPO from memory on three seeds; the mask makes no difference there",
    "r1_searcher": "works: its first stage raises the share that searches, its second the accuracy, on three seeds",
    "ssrl": "runs: what it learns with its own memory holds with the real search; its memory is behind plain GRPO",
    "mars": "runs: its reasoner asks on, and all but stops beside a frozen reader, on three seeds; its reader gets no "
            "better"}


# Text

def prose(text: str) -> str:
    """Plain text as markdown: flags as code, links to recipes, no tag where a < stands."""
    text = re.sub(r"(?<![\w`-])--[a-z][\w-]*", r"`\g<0>`", " ".join(text.split())).replace("<", r"\<")
    return re.sub(r"\brecipe (\w+)", lambda m: f"recipe [{m[1]}](recipes.md#{m[1]})" if m[1] in RESULTS else m[0], text)


def wrapped(text: str, first: str = "", rest: str = "") -> str:
    """Lines of at most WIDTH columns, of which none but the first begins as an item of a list does."""
    glued = re.sub(r" (?=([-+*#]|\d+\.) )", "\0", text)
    return textwrap.fill(glued, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False,
                         break_on_hyphens=False).replace("\0", " ")


def items(lines) -> str:
    return "\n".join(wrapped(line, "- ", "  ") for line in lines)


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[\w)]\.)\s+(?=[A-Z-])", " ".join(text.split()))


def table(columns, rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


# Flags

def described(action: argparse.Action) -> str:
    """A flag in words: its names, its default unless the help says it, its meaning."""
    names = ", ".join(f"`{name}`" for name in action.option_strings or [action.dest])
    # some versions of argparse add the default to the help
    meaning = (action.help or "").replace(" (default: %(default)s)", "") % vars(action)
    default = "" if "default" in meaning or action.default in (None, "", []) else action.default
    if action.required:
        default = "needed"
    elif isinstance(default, bool):
        default = ("on" if default else "off") if len(action.option_strings) > 1 else ""
    elif default != "":
        default = shlex.join(map(str, default if isinstance(default, list) else [default]))
    values = [str(value) for value in action.choices or () if value != ""]
    meaning = "; ".join([prose(meaning)] * bool(meaning) + [f"one of: {', '.join(values)}"] * bool(values))
    return names + f" ({default})" * bool(default) + f": {meaning}" * bool(meaning)


def groups_of(parser: argparse.ArgumentParser, without: set[str] = frozenset()) -> dict[str, list[argparse.Action]]:
    """Title of an argument group -> its flags, less --help and those named; none that is empty."""
    groups = {group.title: [action for action in group._group_actions if action.dest not in {"help", *without}]
              for group in parser._action_groups}
    return {title: actions for title, actions in groups.items() if actions}


def flag_blocks(groups: dict[str, list[argparse.Action]]) -> list[str]:
    """A list of flags per group, below its title where it is not argparse's."""
    return [block for title, actions in groups.items()
            for block in [f"**{title}**"] * (title not in ("options", "positional arguments"))
            + [items(map(described, actions))]]


def task_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add_task_args(parser)
    return parser


def script_blocks(name: str, module) -> list[str]:
    blocks = [f"## {name}", wrapped(prose(sentences(module.__doc__.strip().split("\n\n")[0])[0]))]
    if hasattr(module.make_parser, "func"):  # a partial of another script's
        return [*blocks, "Its flags are those of [tango_rl](#tango_rl). `--recipe` is grpo unless it is given."]
    parser = module.make_parser(["--recipe", "grpo"]) if module is tango_rl else module.make_parser()
    defaults, of_tasks = flag_defaults(parser), set(flag_defaults(task_parser()))
    takes_task = of_tasks <= defaults.keys()
    if takes_task:
        recorded = "" if defaults["task"] else " Those that are not given are as the checkpoint's."
        blocks.append(f"It also takes the [task flags](#task-flags).{recorded}")
    groups = groups_of(parser, of_tasks if takes_task else set())
    groups.pop("recipe grpo", None)
    return blocks + flag_blocks(groups) + (recipe_blocks(defaults) if module is tango_rl else [])


def recipe_blocks(common: dict) -> list[str]:
    """The flags of every recipe; by name alone those that an earlier section has word for word. common: defaults of the
    flags that all recipes share."""
    blocks, owners = [], {}
    for name in RESULTS:
        parser, lines, known = tango_rl.make_parser(["--recipe", name]), [], {}
        own = groups_of(parser).get(f"recipe {name}", [])
        for action in own:
            owner = owners.setdefault(described(action), name)
            if owner == name:
                lines.append(described(action))
            else:
                known.setdefault(owner, []).append(f"`{action.option_strings[0]}`")
        lines += [f"as recipe [{owner}](#recipe-{owner}): {', '.join(flags)}" for owner, flags in known.items()]
        others = [f"`{action.option_strings[0]}` {action.default}" for action in parser._actions
                  if action not in own and action.default != common[action.dest] and action.dest != "recipe"]
        lines += [f"its defaults of shared flags: {', '.join(others)}"] if others else []
        blocks += [f"### Recipe {name}", items(lines) or "It has no flags of its own."]
    return blocks


def flags_page() -> str:
    modules = {m.name: importlib.import_module(f"scripts.{m.name}") for m in pkgutil.iter_modules(scripts.__path__)}
    modules = {name: module for name, module in sorted(modules.items()) if hasattr(module, "make_parser")}
    links = ", ".join(f"[{name}](#{name})" for name in modules)
    intro = (f"{WRITTEN} A script is run as `python -m scripts.NAME`. In brackets stands a flag's default. There are "
             f"{links}, and [task flags](#task-flags) that several take.")
    blocks = ["# Flags", wrapped(intro), *(block for item in modules.items() for block in script_blocks(*item)),
              "## Task flags", *flag_blocks(groups_of(task_parser()))]
    return "\n\n".join(blocks) + "\n"


# Figures

@functools.cache
def points_of(path: str) -> dict[tuple[str, str], list[dict]]:
    """(arm, metric) -> rows of a csv as nanochat/rl/report/report.py writes it. Raises BadInput."""
    rows = {}
    try:
        with open(path, newline="", encoding="utf-8") as f:
            for row in csv.DictReader(f):
                rows.setdefault((row["arm"], row["metric"]), []).append({
                    "seed": int(row["seed"]), "gen_step": int(row["step"]),
                    "sampled_tokens": int(row["sampled_tokens"]), row["metric"]: float(row["value"])})
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path}: {type(error).__name__}: {error}") from None
    return rows


def runs_of(arm: Arm, name: str, metric: str = ACCURACY) -> dict[int, Run]:
    """Seed -> the run of the arm of this name in the csv of `arm`, with the points of one metric. Raises BadInput."""
    path, runs = os.path.join(ROOT, "dev/curves", f"{arm.curves}.csv"), {}
    for point in points_of(path).get((name, metric), []):
        seed = point["seed"]
        runs.setdefault(seed, Run(name, "", name, seed, {}, {}, [], [], [], [])).points.append(point)
    if metric == ACCURACY and not runs:
        raise BadInput(f"{path}: no {metric} of arm {name}")
    return runs


def ends(runs: dict[int, Run]) -> list[str]:
    """Final accuracy, and the tokens sampled in all."""
    tokens = mean(run.points[-1]["sampled_tokens"] for run in runs.values())
    return [spread([run.points[-1][ACCURACY] for run in runs.values()]), f"{tokens / 1e6:.2f}M"]


def difference(arm: Arm, at_tokens: bool = True) -> str:
    """Final accuracy less the baseline's, or with `at_tokens` the accuracy when as many tokens were sampled as the
    baseline did in all: mean over paired seeds and half of its 95% interval, in points. Of how many seeds, where some
    ended before."""
    mine, theirs = runs_of(arm, arm.name), runs_of(arm, arm.baseline)
    values = {seed: at_equal_tokens(run, theirs[seed]) if at_tokens else run.points[-1][ACCURACY]
              for seed, run in mine.items() if seed in theirs}
    gains = [value - theirs[seed].points[-1][ACCURACY] for seed, value in values.items() if value is not None]
    if not gains:
        return "ended before"
    middle, half = interval(gains)
    return (f"{100 * middle:+.1f}" + (f" ± {100 * half:.1f}" if half is not None else "")
            + (f" ({len(gains)} of {len(mine)} seeds)" if len(gains) < len(mine) else ""))


def step_f1(arm: Arm) -> str:
    """The verifier's, before and after; - without one."""
    runs = runs_of(arm, arm.name, STEP_F1).values()
    return change([(run.points[0][STEP_F1], run.points[-1][STEP_F1]) for run in runs])


def warm_up(arm: Arm) -> float:
    """The tokens sampled before the generator's first update, in millions."""
    return mean(max(point["sampled_tokens"] for point in run.points if not point["gen_step"])
                for run in runs_of(arm, arm.name).values()) / 1e6


# Pages

COLUMNS = ("run", "rate", "seeds", "start", "final", "tokens", "GRPO's final", "GRPO's tokens", "minus GRPO, there",
           "step F1")


def result_blocks(name: str) -> list[str]:
    rows, arms = [], RESULTS[name]
    for arm in arms:
        runs = runs_of(arm, arm.name)
        compared = [*ends(runs_of(arm, arm.baseline)), difference(arm)] if arm.baseline else ["-"] * 3
        start = "-" if arm.baseline else spread([run.points[0][ACCURACY] for run in runs.values()])
        rows.append([arm.what, arm.rate, " ".join(map(str, runs)), start, *ends(runs), *compared, step_f1(arm)])
    blocks = [table(*filled(COLUMNS, rows))] if rows else []
    early = dict.fromkeys(f"{warm_up(arm):.2f}M" for arm in arms if arm.baseline and warm_up(arm))
    blocks += [f"Of these tokens {' and '.join(early)} went to the verifier alone, before the generator's first "
               f"update."] if early else []
    blocks += [wrapped(NOTES[name])] if name in NOTES else []
    sources = [f"`{COMMANDS[arm.curves]}`; curves: `dev/curves/{arm.curves}.csv`" for arm in arms]
    return [*blocks, items(sources)]


def trained(name: str, is_trained: bool = True) -> str:
    return ", ".join(role for role, spec in recipes.load(name).ROLES.items() if spec.trained == is_trained)


def starts_from(name: str) -> str:
    """What the SFT of its roles must have, by what it samples with its defaults, and the task where only some will
    do."""
    module, words = recipes.load(name), ["--recipe", name]
    args = parse_flags(tango_rl.make_parser(words), words)
    if hasattr(args, "labels"):
        return "labelled solutions (`--labels`)"
    calls = [call for call in module.calls(args) if not call.given]
    templates, kinds = {template_of(call.wrap) for call in calls}, {}
    for kind, template in DEMOS.items():
        kinds.setdefault(template, []).append(kind)
    shares = [f"{'|'.join(of_one)}:SHARE" for template, of_one in kinds.items() if template in templates]
    is_one = {role: spec.tag == "--model-tag" or is_joint(head_of(args, spec)) for role, spec in module.ROLES.items()}
    joint = [call for call in calls if form_of(call.wrap) and is_one[call.role]]
    forms = sorted({form_of(call.wrap) for call in calls if call not in joint} - {"", "steps"})
    tasks = [task for task in GENERATED if takes_task(module, args, task)]
    needs = [f"task: {' or '.join(tasks)}"] if len(tasks) < len(GENERATED) else []
    sft = ["`--role both`"] * bool(joint) + [f"`--demo-shares {' '.join(shares)}`"] * bool(shares)
    sft += [f"`--verifier-form {form}` for its judge" for form in forms]
    return "; ".join(needs + [f"SFT: {', '.join(sft)}"] * bool(sft))


def takes_task(module, args, task: str) -> bool:
    """Whether a recipe has nothing against a task."""
    given = argparse.Namespace(**vars(args) | {"task": task})
    try:
        getattr(module, "check", lambda *_: None)(given, make_task(given))
    except BadInput:
        return False
    return True


def status_of(name: str) -> str:
    """*works*: why."""
    word, _, why = STATUS[name].partition(": ")
    return f"*{word}*: {prose(why)}."


def recipe_section(name: str) -> list[str]:
    module = recipes.load(name)
    title, _, text = module.__doc__.strip().partition("\n")
    title = re.sub(r"arXiv (\d{4}\.\d{5})", r"arXiv [\1](https://arxiv.org/abs/\1)", title)
    text, _, departures = text.partition("Departures")
    departures, *numbered = re.split(r"\n\d+\. ", departures)
    departures = prose(departures)  # ":" before a list, or words
    departures = departures if departures.startswith(":") else f" {departures}"
    flags, fixed = groups_of(tango_rl.make_parser(["--recipe", name])).get(f"recipe {name}", []), trained(name, False)
    facts = [f"trained: {trained(name)}" + (f"; not trained: {fixed}" if fixed else ""),
             "; ".join(f"{key}: {value}" for key, value in module.TAGS.items()),
             f"[flags of its own](flags.md#recipe-{name}): "
             f"{', '.join(f'`{action.option_strings[0]}`' for action in flags) or 'none'}",
             *[f"starts from: {words}" for words in [starts_from(name)] if words]]
    return [f"## {name}", wrapped(f"{title} File: [{name}.py](../nanochat/recipes/{name}.py)."), wrapped(prose(text)),
            items(facts), wrapped(f"**Status**: {status_of(name)}"),
            wrapped(f"**Departures from the paper**{departures}"),
            "\n".join(wrapped(prose(line), f"{n}. ", "   ") for n, line in enumerate(numbered, 1)),
            "**Checked against the paper by**:", items(f"`tests/{test}`" for test in CHECKS[name]),
            "**Result**:", *result_blocks(name)]


def recipes_page() -> str:
    intro = (f"{WRITTEN} A recipe is a system of the field in one file, started with `python -m scripts.tango_rl "
             "--recipe NAME`. What was learned from these runs is in [results.md](results.md). Whole commands, with "
             "the SFT that a recipe starts from: `bash dev/experiments/selfplay.sh --list`, and `bash "
             "dev/experiments/fig4.sh --list flags`.")
    how = ("The task is chain where only the final result is the answer, so a wrong solution can be right by luck. "
           "A model has 4 layers of width 128. A run makes 60 updates of the generator, of 32 problems x 8 samples "
           "each, without a KL. Arms with a verifier have `--alpha-start 0.5 --alpha-end 0.05`; a verifier that is "
           "trained has `--verifier-lr 1e-4 --verifier-balance --verifier-replay 0.5`. `bash "
           "dev/experiments/fig4.sh --list flags` prints all flags of every arm. The machine is an AMD EPYC (2 cores, "
           "torch 2.13).")
    read = ["*rate*: the generator's learning rate.",
            "*final*: greedy pass@1 on 400 held-out problems at the end, in percent, ± the standard deviation over "
            "seeds. *start*: the same before RL.",
            "*tokens*: what all roles sampled in a run, mean over seeds.",
            "*minus GRPO, there*: pass@1 when the run had sampled as many tokens as GRPO did in all, less GRPO's final "
            "one, in points, ± half of the 95% interval over the paired seeds (Student's t). Between two evaluations "
            "it is read off the line. A seed whose run ended with fewer tokens is left out, and the table says so.",
            "*step F1*: the verifier's, before and after, on solutions of the starting generator, in percent.",
            "*Status*: a recipe *works* where what its paper claims, or what must follow from its formulas, was seen "
            "end to end here, on at least three seeds. It *runs* where its formulas are tested and that was not seen. "
            "It *differs* where a part is left out on which the claim rests."]
    blocks = ["# Recipes", wrapped(intro), "## How to read the results", wrapped(how), items(read),
              *(block for name in RESULTS for block in recipe_section(name) if block)]
    return "\n\n".join(blocks) + "\n"


def quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def readme_table() -> str:
    rows, links = [], {}
    beside = [name for names in BESIDE.values() for name in names]
    others = [name for name in RESULTS if name in NOT_COMPARED or not RESULTS[name] and name not in beside]
    for name, arms in ((name, arms) for name, arms in RESULTS.items() if name not in (*others, *beside)):
        system = re.split(r" \(|:", recipes.load(name).__doc__)[0]
        paper = re.search(r"arXiv (\d{4}\.\d{5})", recipes.load(name).__doc__)[1]
        links[paper] = f"https://arxiv.org/abs/{paper}"
        seeds = f"{len(runs_of(arms[0], arms[0].name))} seeds"
        compared = ["the baseline", "-"]
        if arms[0].baseline:
            compared = [difference(arms[0], at_tokens=False), difference(arms[0])]
        rows.append([system, f"`{name}`", f"[{paper}]", trained(name), seeds, *compared])
    grpo, tango = RESULTS["grpo"][0], RESULTS["tango"][0]
    final, tokens = ends(runs_of(grpo, grpo.name))
    words = ("A system is a recipe: one file in `nanochat/recipes/` that reads like its paper. `--recipe NAME` runs "
             "it. The last columns are pass@1 minus GRPO's, in points, each at its own learning rate: at the end, and "
             "at the point where a run has sampled as many tokens as GRPO does in all (in brackets: on how many seeds "
             "it gets there). The setting is harder than above: only the last result is the answer, so a wrong "
             f"solution can be right by luck. GRPO ends at {final.partition(' ')[0]}% there. Of its {tokens} tokens "
             f"Tango spends {warm_up(tango):.2f}M before the generator's first update. ± is half of the 95% interval "
             "over paired seeds. Others are compared in settings of their own. "
             + " ".join(f"[{part}](dev/results.md#{anchor(part)}): {quoted(names)}." for part, names in BESIDE.items())
             + f" Not compared: {quoted(others)}. All: [dev/recipes.md](dev/recipes.md).")
    columns = ("system", "recipe", "paper", "what is trained", "measured", "at equal steps", "at GRPO's tokens")
    return "\n\n".join([wrapped(words), table(columns, rows), "\n".join(f"[{a}]: {b}" for a, b in links.items())])


def with_table(text: str) -> str:
    """The README with the table of recipes between its markers. Raises BadInput unless it has one of each."""
    parts = re.split(f"^({BEGIN}|{END})$", text, flags=re.MULTILINE)
    if parts[1::2] != [BEGIN, END]:
        raise BadInput(f"README.md: needs the line {BEGIN} and behind it the line {END}, once each")
    return f"{parts[0]}{BEGIN}\n{readme_table()}\n{END}{parts[4]}"


def pages() -> dict[str, str]:
    """Path -> text. Raises BadInput."""
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
        readme = with_table(f.read())
    return {"README.md": readme, "dev/flags.md": flags_page(), "dev/recipes.md": recipes_page()}


def main(args) -> None:
    for path, text in pages().items():
        try:
            with open(os.path.join(ROOT, path), "w", encoding="utf-8") as f:
                f.write(text)
        except OSError as error:
            raise BadInput(f"cannot write {path}: {error.strerror}") from None
        print0(path)


if __name__ == "__main__":
    script_main(main, argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                              formatter_class=argparse.RawDescriptionHelpFormatter))
