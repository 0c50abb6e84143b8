"""What the ranks of the tests of samples do."""

import torch

from tests.distributed.state_workers import started
from tests.run_configs import read_config
from training.build import build_data, build_parallel_model
from training.samples import next_tokens


def continuations(folder: str, layouts: list[dict[str, int]]) -> list[list[list[int]]]:
    """The token after some positions of three windows, for each layout."""
    found = []
    for layout, groups in started(layouts):
        config = read_config(folder, **{f"parallel__{key}": size for key, size in layout.items()})
        model = build_parallel_model(config, groups)
        _, validation = build_data(config)
        windows = torch.stack(
            [torch.from_numpy(validation[0].set.window(i)[:-1]) for i in range(3)]
        )
        vocab = config.model.vocab_size
        places = (0, 7, 8, 20, 31)
        found.append([next_tokens(model, groups, windows, p, vocab).tolist() for p in places])
    return found
