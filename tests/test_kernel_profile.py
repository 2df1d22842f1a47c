"""
What a profile says of kernels: their kinds, what they took, what they had to do, what fills the distance.

    python -m pytest tests/test_kernel_profile.py
"""
import json

import pytest
from conftest import parse

from dev.bench import kernel_profile
from dev.bench.kernel_profile import Event, distances, gap_lines, kernel_lines, kinds_of, summary, unknown_lines
from nanochat.cli import script_main
from nanochat.gpt import GPT, GPTConfig

SPEED = 1e12, 1e9  # 1 MFLOP a microsecond, 1 kB a microsecond


def events(*names: str, us: float = 10.0, gap: float = 2.0) -> list[Event]:
    """Kernels one after the other, each `us` long and `gap` after the one before."""
    return [Event(name, i * (us + gap), i * (us + gap) + us, us) for i, name in enumerate(names)]


@pytest.mark.parametrize("name, kind", [
    ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "products"), ("ampere_bf16_s16816gemm_bf16_128x64", "products"),
    ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>(Params)", "products"), ("aten::addmm", "products"),
    ("attention_forward", "attention"), ("decode_rows", "attention"), ("draw_rows", "head"), ("head_rows", "block"),
    ("void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>()", "attention"), ("elements", "block"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)", "elementwise"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<long>>(int)", "copies"),
    ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda()>(int)", "copies"),
    ("Memcpy HtoD (Pageable -> Device)", "copies"), ("Memset (Device)", "copies"),
    ("void at::native::index_elementwise_kernel<128, 4>(long)", "indexing"),
    ("void at_cuda_detail::cub::DeviceScanKernel<int>()", "indexing"),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>()", "optimizer"),
    ("mystery_kernel", "other")])
def test_names_tell_kinds(name, kind):
    assert kernel_profile.kind_of(name) == kind


def test_products_beside_a_kernel_of_the_head_are_the_heads():
    """The last before it; after the loss two more, a sum that a product was split into not counted."""
    assert kinds_of(events("gemm", "norm_rows", "gemm", "Memset", "segment_statistics", "draw_rows", "gemm")) == [
        "products", "block", "head", "copies", "head", "head", "products"]
    assert kinds_of(events("gemm", "gemm", "policy_rows", "gemm", "splitKreduce", "Memcpy", "gemm", "gemm")) == [
        "products", "head", "head", "head", "head", "copies", "head", "products"]


def test_a_parts_time_is_its_kernels_and_gaps():
    """Five kernels of 10 us, 2 us apart: 58 us. 5 kB of weights take 5 us, 6 MFLOP 6 us."""
    found = summary(events("gemm", "mystery", "norm_rows", "gemm", "draw_rows"),
                    {"products": (5e3, 2e6), "head": (1e3, 6e6), "attention": (3e3, 0)}, SPEED)
    assert (found["span_us"], found["gaps_us"], found["launches"]) == (58.0, 8.0, 5)
    # No kernel of attention was found: what it must do is put to the products.
    assert found["kinds"]["products"] == {"launches": 1, "us": 10.0, "bytes": 8e3, "flops": 2e6, "floor_us": 8.0}
    assert found["kinds"]["head"] == {"launches": 2, "us": 20.0, "bytes": 1e3, "flops": 6e6, "floor_us": 6.0}
    assert found["kinds"]["other"] == {"launches": 1, "us": 10.0} and found["floor_us"] == 14.0
    rows = distances(found)
    assert rows == {"products": (10.0, 8.0), "head": (20.0, 6.0), "other kernels": (20.0, 0.0), "gaps": (8.0, 0.0),
                    "all": (58.0, 14.0)}
    assert sum(us - floor for us, floor in rows.values()) == 2 * (58 - 14)  # the rows, and all


def test_tables_drop_nothing():
    names = ["gemm"] * 3 + ["mystery"] + ["void at::native::index_kernel<long>()"] * 2
    lines = list(kernel_lines(events(*names), 70.0))
    assert [line.split()[:3] for line in lines[1:]] == [
        ["products", "3", "30.0"], ["indexing", "2", "20.0"], ["other", "1", "10.0"]]
    assert lines[2].endswith("  index_kernel<long>()") and "42.9%" in lines[1]
    tiny = [*events(*names), Event("b", 100, 100.01, 0.01), Event("c", 101, 101.02, 0.02)]
    assert list(kernel_lines(tiny, 102.0))[-1].split()[:3] == ["2", "0.0", "0.0%"]
    assert list(unknown_lines(set())) == [] and "mystery" in next(unknown_lines({"mystery"}))
    assert len(list(unknown_lines({"mystery"}))) == 1 + len(kernel_profile.RULES)


def test_gaps_are_between_the_kernel_that_ends_last_and_the_next():
    nested = [Event("outer", 0, 20, 15), Event("inner", 5, 10, 5), Event("next", 21, 22, 1), Event("far", 30, 31, 1)]
    assert list(gap_lines(nested)) == ["gap of 8.0 us between next and far", "gap of 1.0 us between outer and next"]


def test_what_parts_cannot_do_without_is_counted_by_hand():
    """2 layers of width 24, 2 heads of 12, one of keys, in fp32; the head is 128 x 24. Per layer q and out are 24 x 24,
    k and v 24 x 12, the MLP 2 x 24 x 96."""
    model = GPT(GPTConfig(64, 70, 2, 2, 1, 24, "L"))
    layer, keys, head = 2 * 24 * 24 + 2 * 24 * 12 + 2 * 24 * 96, 2 * 24 * 12, 128 * 24
    token = kernel_profile.token_work(model, 2, 6, 5, 4)  # 2 prompts of 5, 6 rows with 4 of their own
    assert token == {"products": (8 * layer, 2 * 2 * layer * 6), "head": (4 * head, 2 * head * 6),
                     "attention": (4 * 2 * 2 * 12 * (10 + 24), 4 * 24 * 2 * 6 * 9)}
    refill = kernel_profile.refill_work(model, 2, 6, 5)  # pairs: 15 of a prompt's first layer, 5 of its last
    assert refill == {"products": (4 * (layer + keys), 2 * (layer + keys) * 10), "head": token["head"],
                      "attention": (4 * 2 * 2 * 3 * 12 * 10, 4 * 24 * 2 * (15 + 5))}
    update = kernel_profile.update_work(model, 2, 6, 5, 4)
    assert update["head"] == (3 * 4 * head, 6 * head * 24) and update["optimizer"][1] == 0
    assert update["products"] == (3 * 8 * layer, 6 * ((layer + keys) * 10 + 2 * layer * 24))
    assert update["attention"] == (4 * 6 * 3 * 12 * 2 * 34, 6 * 24 * (2 * 25 + 2 * 24 * 14))
    assert update["optimizer"][0] == 28 * sum(p.numel() for p in model.parameters())


def test_it_profiles_operations_on_a_cpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kernel_profile, "machine_speed", lambda device, dtype: SPEED)
    flags = ["--device-type", "cpu", "--vocab-size", "70", "--depth", "1", "--n-embd", "24", "--n-head", "2", "--rows",
             "4", "--num-samples", "2", "--prompt-len", "5", "--completion-len", "4", "--examples-per-step", "2"]
    kernel_profile.main(parse(kernel_profile, [*flags, "--trace", str(tmp_path)]))
    out = capsys.readouterr().out
    results = json.loads(out.splitlines()[-1])["results"]
    assert list(results) == ["token", "refill", "update"] and out.count("what fills the distance") == 3
    for part in results.values():
        kinds = part["kinds"].values()
        assert part["launches"] == sum(kind["launches"] for kind in kinds) and part["wall_us"] > 0
        assert part["span_us"] - part["gaps_us"] == pytest.approx(sum(kind["us"] for kind in kinds), rel=1e-3)
    assert "optimizer" in results["update"]["kinds"] and len(list(tmp_path.iterdir())) == 3


def test_rows_that_share_no_prompt_evenly_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        script_main(kernel_profile.main, kernel_profile.make_parser(), ["--rows", "7", "--num-samples", "2"])
    assert stop.value.code == 2 and "--rows 7" in capsys.readouterr().err
