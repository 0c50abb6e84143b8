"""Run ten steps of torchtitan's trainer with SSO on its debug model, under torchrun on CPU ranks.

GPU-only parts of torchtitan 0.3 are replaced: the device name and memory, the attention kernel, and
FSDP's scaled sum, which gloo does not support.
"""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils as device
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.distributed.fsdp import FSDPModule

from tests.paths import ROOT

sys.modules["spectrain"] = importlib.import_module("spectral")
sys.path.insert(0, str(ROOT / "examples" / "adapters"))
HEAD = 16


class Host:
    """A CPU device with the GPU properties that torchtitan reads."""

    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    empty_cache = reset_peak_memory_stats = staticmethod(lambda: None)
    get_device_name = staticmethod(lambda *_: "cpu")
    get_device_properties = staticmethod(lambda *_: SimpleNamespace(total_memory=1 << 34))
    memory_stats = staticmethod(lambda *_: {})

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """Compute causal attention like torchtitan's compiled kernel, without document masks."""
    same = {key: options[key] for key in ("scale", "enable_gqa")}
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, **same), None


def main(folder: str) -> None:
    """Train with a tokenizer in `folder` and check that every head is on its sphere."""
    device.device_type, device.device_module = "cpu", Host()  # before other modules import them
    from torchtitan.distributed import utils
    from torchtitan.hf_datasets import text_datasets
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    adapter = importlib.import_module("torchtitan_container")
    utils.set_pg_timeouts = lambda **_: None  # uses names from a newer torch
    FlexAttention._compiled_flex_attn = staticmethod(attention)
    texts = [{"text": path.read_text()} for path in sorted((ROOT / "docs").glob("*.md"))]
    text_datasets.DATASETS["docs"] = text_datasets.DatasetConfig(
        "", lambda _: Dataset.from_list(texts), lambda sample: sample["text"]
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    learner = trainers.BpeTrainer(vocab_size=512, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator((sample["text"] for sample in texts), learner)
    tokenizer.save(f"{folder}/tokenizer.json")

    config = llama3_debugmodel()
    config.hf_assets_path, config.dump_folder, config.dataloader.dataset = folder, folder, "docs"
    config.training.seq_len, config.training.local_batch_size = 64, 2
    config.training.disable_cuda_graphs = True
    config.validator.enable = False
    config.checkpoint.enable = True  # after the last step
    config.parallelism.spmd_backend = "partial_dtensor"
    groups = adapter.spectral_groups("SpectralSphere", lr=5e-3, head_dim=HEAD, adamw_lr=3e-4)
    config.optimizer = adapter.SpectralOptimizers.Config(param_groups=groups)
    trainer = config.build()
    (model,) = trainer.model_parts
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    trainer.train()
    weight = model.get_parameter("layers.1.attention.qkv_linear.wqkv.weight").full_tensor().detach()
    norms = torch.linalg.matrix_norm(weight.unflatten(0, (-1, HEAD)), 2)
    radius = (HEAD / weight.shape[1]) ** 0.5
    torch.testing.assert_close(norms, torch.full_like(norms, radius), rtol=0.02, atol=0)
    print(f"{trainer.step} steps")
    trainer.close()


if __name__ == "__main__":
    main(sys.argv[1])
