"""What scores of tasks cost, by the model of plans."""

from parallel.plan.planner import Plan
from training.config import Config
from training.data.build_data import build_tasks
from training.dry_run import gpu_hours
from training.errors import InputError
from training.task_scores import lengths


def task_cost(config: Config, planned: Plan) -> str | None:
    """Return what scores of the config's tasks cost, or why that is not known; None without."""
    section, train = config.tasks, config.train
    if not section.files:
        return None
    try:
        tasks = build_tasks(config)
    except InputError as error:
        return f"of unknown cost: {error}"
    steps = lengths(config.parallel.layout, train.sequence_length)
    sequences = [len(request.tokens) - 1 for task in tasks for request in task.requests]
    tokens = sum(next(step for step in steps if step >= length) for length in sequences)
    step_tokens = train.global_batch * train.sequence_length
    seconds = planned.time.forward * tokens / step_tokens
    times = 1 + (train.last - 1) // section.interval if section.interval else 1
    share = times * seconds * planned.gpus / (3600 * gpu_hours(config, planned))
    often = f"every {section.interval:,} steps" if section.interval else "after the last step"
    return (
        f"{', '.join(section.files)}, {often}: {len(sequences):,} sequences of {tokens:,} tokens, "
        f"{seconds:.3g} s each time, modelled, which adds {share:.1%} to the time of the run"
    )
