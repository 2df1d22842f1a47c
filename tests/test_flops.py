"""FLOPs of a model per token, by hand and against PyTorch's counter; the peaks of GPUs."""
import pytest
import torch
from test_base_train import small_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nanochat.attention import make_mask
from nanochat.flops import flops_per_token, matrix_parameters, peak_flops, tokens_seen
from nanochat.kernels import ops
from nanochat.loss_eval import supervised_loss


def test_flops_are_six_per_weight_and_twelve_per_score():
    model = small_model(n_layer=3, window_pattern="SL", sequence_len=512)
    # per layer q 32x32, k and v 16x32, proj 32x32, MLP 2 x 32x128; ve_gate 1x12 on layers 0 and 2; head 320x32; smear
    # gate 1x24
    weights = 3 * (32 * 32 * 2 + 2 * 16 * 32 + 2 * 32 * 128) + 2 * 12 + 320 * 32 + 24
    assert matrix_parameters(model) == weights
    # windows S L, the last layer L: a token sees itself and up to 128 before it, or all of those, 511 at most
    seen = [sum(min(t, window) + 1 for t in range(512)) / 512 for window in (128, 511, 511)]
    assert flops_per_token(model) == pytest.approx(6 * weights + 12 * 32 * sum(seen))
    assert tokens_seen(512, 511) == tokens_seen(512, 10 ** 6) == 256.5 and tokens_seen(1, 128) == 1


def test_flops_are_those_that_pytorch_counts_without_what_masks_throw_away(monkeypatch):
    """By the operations that CUDA takes; scores that a mask hides, six products each, earn no credit."""
    model = small_model(vocab_size=256, n_layer=3, window_pattern="SL", sequence_len=300)
    ids = torch.randint(256, (3, 301), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(ops, "mkl_is_slow", lambda: False)  # of oneDNN's products it counts none
    # PyTorch does not count this one.
    in_place = {torch.ops.aten.addmm_: lambda total, a, b, out_shape=None, **options: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as count, sdpa_kernel(SDPBackend.MATH):
        supervised_loss(model, ids, None, 1.0).backward()
    positions = torch.arange(300)[None]
    masks = [make_mask(300, window, 300, None, None, positions, torch.float32) for window in model.windows]
    hidden = 3 * sum(int((mask.own < 0).sum()) for mask in masks)
    assert len(set(model.windows)) == 2 and hidden > 3 * 3 * 300 ** 2 / 2
    assert 900 * flops_per_token(model) == pytest.approx(count.get_total_flops() - 12 * 32 * hidden, rel=1e-12)


@pytest.mark.parametrize("name, tflops", [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756),
                                          ("NVIDIA H100 NVL", 835), ("NVIDIA GB200", 2500), ("NVIDIA B200", 2250),
                                          ("NVIDIA A100-SXM4-80GB", 312), ("Other", None)])
def test_the_peak_is_that_of_the_gpus_name(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == (None if tflops is None else tflops * 1e12)
