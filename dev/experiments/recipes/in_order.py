"""Chain whose first problems of RL come in the order of their length: the same ones, the short or the long ones first.
"""
from dataclasses import replace

from nanochat.cli import at_least
from tasks import chain


def add_args(parser):
    parser.add_argument("--in-order-first", default="short", choices=["short", "long"], help="what comes first")
    parser.add_argument("--in-order-problems", type=at_least(1), default=960, help="how many are put in order")


class InOrder(chain.Chain):
    name = "in_order"

    def __init__(self, args, seed: int):
        super().__init__(args, seed)
        sign = 1 if args.in_order_first == "short" else -1
        length = lambda index: sign * len(chain.Chain.problem(self, "rl", index).prompt)
        self.order = sorted(range(args.in_order_problems), key=length)  # those of one length as they come

    def problem(self, split, index):
        if split != "rl" or index >= len(self.order):
            return super().problem(split, index)
        return replace(super().problem(split, self.order[index]), index=index)
