"""The pooled head's file on its own: folders that open elsewhere, low precision, configuration round trips."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from raytrain_bert.config.schema import ModelConfig
from raytrain_bert.model.build import build_model, save_model
from raytrain_bert.model.pooled import POOLERS, PooledConfig, PooledForSequenceClassification
from tests.tiny import tiny_bert, tiny_model

LABELS = ("world", "sports", "business", "science")
IDS = [[2, 9, 14, 22, 3], [2, 30, 3, 0, 0]]
MASK = [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]

READ_LOGITS = """
import json, sys, torch
{before}
from transformers import AutoModelForSequenceClassification, pipeline
folder, ids, mask = json.loads(sys.argv[1])
model = AutoModelForSequenceClassification.from_pretrained(folder, **{options}).eval()
logits = model(torch.tensor(ids), attention_mask=torch.tensor(mask)).logits
answer = pipeline("text-classification", model=folder, **{options})("good film")[0]
print(json.dumps({{"logits": logits.tolist(), "label": answer["label"], "module": type(model).__module__}}))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    base = tmp_path_factory.mktemp("pooled")
    encoder = tiny_bert(base / "encoder")
    model = build_model(ModelConfig(name=str(encoder), pooling="last"), LABELS, seed=0).eval()
    save_model(model, AutoTokenizer.from_pretrained(encoder), base / "model", max_length=20)
    return model, base / "model"


def in_another_process(folder: Path, code: str, tmp_path: Path) -> dict[str, object]:
    """Run code in an isolated Python (-I) in another folder, without the hub."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-I", "-c", code, json.dumps([str(folder), IDS, MASK])]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize(
    ("before", "options", "module"),
    [
        # The plain class, no permission to run code: the import has registered it.
        ("import raytrain_bert.model.pooled", {}, "raytrain_bert.model.pooled"),
        # None makes every import of the name fail, installed or not.
        ("sys.modules['raytrain_bert'] = None", {"trust_remote_code": True}, "transformers_modules"),
    ],
    ids=["registered", "copied code"],
)
def test_another_process_reads_the_same_logits(
    saved: tuple[PreTrainedModel, Path], tmp_path: Path, before: str, options: dict[str, bool], module: str
) -> None:
    model, folder = saved
    got = in_another_process(folder, READ_LOGITS.format(before=before, options=options), tmp_path)
    expected = model(torch.tensor(IDS), attention_mask=torch.tensor(MASK)).logits
    torch.testing.assert_close(torch.tensor(got["logits"]), expected, rtol=1e-5, atol=1e-6)
    assert got["label"] in LABELS
    assert str(got["module"]).startswith(module)


def test_a_model_folder_names_no_path_of_this_machine(saved: tuple[PreTrainedModel, Path]) -> None:
    _, folder = saved
    for file in folder.glob("*.json"):
        assert str(folder.parent) not in file.read_text(encoding="utf-8"), file.name


def test_configuration_survives_every_round_trip(saved: tuple[PreTrainedModel, Path]) -> None:
    config = saved[0].config
    for back in (PooledConfig.from_dict(config.to_dict()), PooledConfig.from_pretrained(saved[1])):
        assert (back.pooling, back.num_labels, back.id2label) == ("last", 4, dict(enumerate(LABELS)))
        assert type(back.encoder) is type(config.encoder)
        assert back.encoder.to_dict() == config.encoder.to_dict()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pooling", POOLERS)
def test_pooling_is_safe_in_low_precision(pooling: str, dtype: torch.dtype) -> None:
    # 4,096 tokens of about 100: a float16 sum overflows at 65,504, a bfloat16 sum stops growing far below.
    hidden = (100 + torch.randn(2, 4096, 3, generator=torch.Generator().manual_seed(0))).to(dtype)
    mask = torch.ones(2, 4096, dtype=torch.long)
    mask[1, 3000:] = 0
    got = POOLERS[pooling](hidden, mask)
    assert got.dtype == dtype
    exact = POOLERS[pooling](hidden.double(), mask)
    torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(dtype).eps, atol=0)


def test_maximum_of_negative_numbers_is_not_the_padding() -> None:
    hidden = torch.tensor([[[-3.0], [-2.0], [0.0]]])
    assert POOLERS["max"](hidden, torch.tensor([[1, 1, 0]])).item() == -2.0


@pytest.mark.parametrize("pooling", POOLERS)
def test_values_in_padding_reach_neither_logits_nor_gradient(pooling: str) -> None:
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    hidden = torch.randn(2, 3, 4)
    changed = torch.where(mask.unsqueeze(-1) == 0, 1e4, hidden).requires_grad_()
    pooled = POOLERS[pooling](changed, mask)
    torch.testing.assert_close(pooled, POOLERS[pooling](hidden, mask))
    pooled.sum().backward()
    assert changed.grad is not None
    assert not changed.grad[mask == 0].any()


def test_loss_is_cross_entropy(saved: tuple[PreTrainedModel, Path]) -> None:
    model, labels = saved[0], torch.tensor([2, 0])
    output = model(torch.tensor(IDS), attention_mask=torch.tensor(MASK), labels=labels)
    by_hand = -output.logits.log_softmax(dim=-1)[torch.arange(2), labels].mean()
    torch.testing.assert_close(output.loss, by_hand)


def test_token_types_reach_an_encoder_that_has_them_and_no_other(tmp_path: Path) -> None:
    ids, types = torch.tensor(IDS[:1]), torch.tensor([[0, 0, 1, 1, 1]])
    for architecture, differs in (("bert", True), ("distilbert", False)):
        folder = tiny_model(tmp_path / architecture, architecture)
        model = build_model(ModelConfig(name=str(folder), pooling="mean"), LABELS, seed=0).eval()
        same = torch.equal(model(ids, token_type_ids=types).logits, model(ids).logits)
        assert same != differs, architecture


def test_head_is_one_linear_layer_over_the_encoders_width(saved: tuple[PreTrainedModel, Path]) -> None:
    model = saved[0]
    assert isinstance(model, PooledForSequenceClassification)
    beside = [module for name, module in model.named_modules() if name and not name.startswith("encoder")]
    assert [type(module) for module in beside] == [nn.Dropout, nn.Linear]
    assert model.classifier.weight.shape == (4, 32)
    assert not any("pooler" in name for name, _ in model.named_parameters())
    assert model.encoder.config._attn_implementation == "sdpa"
