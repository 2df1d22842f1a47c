"""
Rollouts as the report shows them: cut at their steps, their text cut where the advantage changes.
"""
from statistics import mean

from nanochat.rl.records.rollouts import grouped

# What a card shows of a logged rollout in places of its own; other columns are facts.
SHOWN = {"step", "role", "call", "problem", "gold", "solution", "outcome", "step_labels", "step_spans", "step_ends",
         "token_ends", "finish_reason", "advantages", "completion", "verification", "step_verdicts", "verdict", "unmet",
         "reward", "turns", "proposed"}


def segments(text: str, start: int, end: int, token_ends: list[int], advantages: list[float]) -> list[list]:
    """text[start:end] as [text, advantage] pairs, cut where the advantage changes; it is None after the last token's
    text. A token without text (the end token, where it is inside) is a pair of its own."""
    found, at = [], 0
    for token_end, advantage in zip(token_ends, advantages, strict=False):
        piece = text[max(at, start): min(token_end, end)]
        if piece and found and found[-1][0] and found[-1][1] == advantage:
            found[-1][0] += piece
        elif piece or at == token_end == end == len(text):
            found.append([piece, advantage])
        at = token_end
    rest = text[max(at, start): end]
    return found + [[rest, None]] if rest else found


def mean_of(advantages: list[float | None]) -> float | None:
    """The mean of those that are numbers: NaN is logged as null."""
    numbers = [advantage for advantage in advantages if advantage is not None]
    return round(mean(numbers), 3) if numbers else None


def card(rollout: dict, solver: str = "generator") -> dict:
    """A logged rollout as a card: its solution's steps, each with verdict, gold label and mean advantage, and the texts
    after it; the one learned from in `segments`. solver: the role whose verified solutions are its own."""
    role, call = rollout["role"], rollout.get("call")
    spans, text, verdicts = rollout["step_spans"], rollout["solution"], rollout.get("step_verdicts") or []
    completion, verification = rollout.get("completion"), rollout.get("verification")
    is_own = completion is None and (role == solver or verification is None)
    advantages, ends = rollout["advantages"], rollout.get("token_ends") or []
    of_solution = (ends, advantages) if is_own else ([], [])
    steps, at = [], 0
    for k, (_, end) in enumerate(spans):
        first = rollout["step_ends"][k - 1] + 1 if k else 0
        inside = advantages[first: rollout["step_ends"][k] + 1] if is_own else []
        steps.append({"text": segments(text, at, end, *of_solution),
                      "label": rollout["step_labels"][k] if k < len(rollout["step_labels"]) else None,
                      "verdict": verdicts[k] if k < len(verdicts) else None,
                      "advantage": mean_of(inside)})
        at = end
    learned = "answer" if is_own else "verification" if completion is None else "completion"
    tail = advantages[rollout["step_ends"][-1] + 1 if is_own and spans else 0:]  # of another text: all of it
    texts = {name: segments(value, 0, len(value), *((ends, advantages) if learned == name else ([], [])))
             for name, value in (("completion", completion), ("verification", verification)) if value is not None}
    return {"role": role, "player": f"{role}: {call}" if call and call != role else role, "step": rollout["step"],
            "problem": rollout["problem"], "gold": rollout["gold"], "turns": rollout.get("turns") or [], "steps": steps,
            "answer": segments(text, at, len(text), *of_solution), **texts, "learned": learned,
            "advantage": mean_of(tail), "outcome": rollout.get("outcome"),
            "reward": rollout.get("reward"), "judged": verification is not None, "verdict": rollout.get("verdict"),
            "unmet": rollout.get("unmet") or [], "finish_reason": rollout["finish_reason"],
            "proposed": rollout.get("proposed"),
            "facts": {name: v for name, v in rollout.items() if name not in SHOWN and v is not None}}


def cards(rollouts: list[dict], solver: str, most: int) -> list[dict]:
    """The cards of a run, those of one step about one problem with the same `group`: whole groups, evenly spread over
    the run, about `most` cards in all and at least one group."""
    groups = grouped(((rollout["step"], rollout["problem"]) for rollout in rollouts), rollouts)
    fitting = len(groups) * most // max(1, len(rollouts))
    chosen = evenly(list(groups.values()), max(1, fitting))
    return [{**card(rollout, solver), "group": g} for g, group in enumerate(chosen) for rollout in group]


def evenly(items: list, most: int) -> list:
    """At most `most` of the items, evenly spread."""
    return items if len(items) <= most else [items[i * len(items) // most] for i in range(most)]
