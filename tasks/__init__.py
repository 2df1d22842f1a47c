"""Tasks by name. Each module has add_args(parser) for its flags and a class that takes (args, seed)."""
from nanochat.common import BadInput
from tasks import chain, last_letter, mixture

TASKS = {"chain": chain.Chain, "last_letter": last_letter.LastLetter, "mixture": mixture.Mixture}
MODULES = (chain, last_letter, mixture)


def add_task_args(parser) -> None:
    """--task and the flags of every task."""
    parser.add_argument("--task", default="chain", help=f"one of: {', '.join(TASKS)}")
    for module in MODULES:
        module.add_args(parser)


def make_task(args):
    """The task that --task names. Raises BadInput for an unknown name or flags that do not fit."""
    if args.task not in TASKS:
        raise BadInput(f"--task {args.task}: there are {', '.join(TASKS)}")
    return TASKS[args.task](args, args.seed)
