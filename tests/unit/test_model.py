"""Every architecture, native and pooled: gradients everywhere, freezing, dropout, save and load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from raytrain_bert.config.errors import ConfigError, ModelError
from raytrain_bert.config.schema import ModelConfig
from raytrain_bert.model.build import (
    accepts_token_types,
    build_model,
    load_model,
    load_tokenizer,
    longest_input,
    save_model,
)
from raytrain_bert.model.layers import encoder_layers, encoder_of, parameter_depth
from raytrain_bert.model.pooled import POOLERS
from tests.tiny import ARCHITECTURES, tiny_model

LABELS = ("world", "sports", "business", "science")
POOLINGS = ("native", *POOLERS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("tiny")
    return {name: tiny_model(base / name, name) for name in ARCHITECTURES}


def build(folder: Path, **settings: object) -> nn.Module:
    return build_model(ModelConfig.model_validate({"name": str(folder)} | settings), LABELS, seed=0)


def batch(rows: int = 3, length: int = 9) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, 4:] = 0
    ids = torch.randint(5, 60, (rows, length), generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_trained_parameter_gets_a_gradient(folders: dict[str, Path], architecture: str, pooling: str) -> None:
    model = build(folders[architecture], pooling=pooling).train()
    logits = model(**batch()).logits
    assert logits.shape == (3, len(LABELS))
    logits.square().sum().backward()
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_model_comes_back_with_the_same_logits(
    folders: dict[str, Path], tmp_path: Path, architecture: str, pooling: str
) -> None:
    model = build(folders[architecture], pooling=pooling).eval()
    save_model(model, AutoTokenizer.from_pretrained(folders[architecture]), tmp_path, max_length=17)
    back = load_model(tmp_path)
    assert torch.equal(back(**batch()).logits, model(**batch()).logits)
    assert back.config.id2label == dict(enumerate(LABELS))
    assert not list(tmp_path.glob("*.bin"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_does_not_change_pooled_logits(folders: dict[str, Path], architecture: str) -> None:
    inputs = batch()
    short = {name: tensor[:1, :4] for name, tensor in inputs.items()}
    for pooling in POOLERS:
        model = build(folders[architecture], pooling=pooling).eval()
        torch.testing.assert_close(model(**inputs).logits[:1], model(**short).logits, rtol=1e-4, atol=1e-5)


def test_pooling_is_what_it_says(folders: dict[str, Path]) -> None:
    inputs = batch()
    encoder = AutoModel.from_pretrained(folders["bert"]).eval()
    hidden = encoder(**inputs).last_hidden_state
    real = [row[mask.bool()] for row, mask in zip(hidden, inputs["attention_mask"], strict=True)]
    expected = {
        "cls": torch.stack([row[0] for row in real]),
        "last": torch.stack([row[-1] for row in real]),
        "mean": torch.stack([row.mean(dim=0) for row in real]),
        "max": torch.stack([row.max(dim=0).values for row in real]),
    }
    for pooling, vectors in expected.items():
        model = build(folders["bert"], pooling=pooling).eval()
        torch.testing.assert_close(model(**inputs).logits, model.classifier(vectors), rtol=1e-4, atol=1e-5)
        assert sum(isinstance(module, nn.Linear) and module.out_features == 4 for module in model.modules()) == 1


@pytest.mark.parametrize("pooling", POOLERS)
def test_left_padding_is_pooled_like_right_padding(pooling: str) -> None:
    hidden, mask = torch.randn(2, 6, 5), torch.tensor([[1, 1, 1, 0, 0, 0], [1] * 6])
    left_hidden, left_mask = torch.roll(hidden[:1], 3, dims=1), torch.roll(mask[:1], 3, dims=1)
    torch.testing.assert_close(POOLERS[pooling](left_hidden, left_mask), POOLERS[pooling](hidden, mask)[:1])


def test_a_missing_mask_means_that_all_tokens_are_real(folders: dict[str, Path]) -> None:
    model = build(folders["bert"], pooling="last").eval()
    ids = batch()["input_ids"].clamp(min=5)
    torch.testing.assert_close(model(ids).logits, model(ids, attention_mask=torch.ones_like(ids)).logits)


def test_a_pooled_model_opens_where_this_project_is_unknown(folders: dict[str, Path], tmp_path: Path) -> None:
    model = build(folders["distilbert"], pooling="last").eval()
    save_model(model, AutoTokenizer.from_pretrained(folders["distilbert"]), tmp_path / "model", max_length=20)
    code = (
        "import json, sys, torch\n"
        "from transformers import pipeline\n"
        f"use = pipeline('text-classification', model={str(tmp_path / 'model')!r}, trust_remote_code=True)\n"
        "assert 'raytrain_bert' not in sys.modules\n"
        "print(json.dumps(use('good film', top_k=None)))\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    got = {line["label"]: line["score"] for line in json.loads(done.stdout.splitlines()[-1])}
    inputs = AutoTokenizer.from_pretrained(tmp_path / "model")("good film", return_tensors="pt")
    expected = model(**inputs).logits.softmax(-1)[0].tolist()
    assert [got[label] for label in LABELS] == pytest.approx(expected, abs=1e-5)


def test_new_weights_depend_on_the_seed_alone(folders: dict[str, Path]) -> None:
    state = torch.random.get_rng_state()
    settings = ModelConfig(name=str(folders["bert"]), pooling="mean")
    first, second, third = (build_model(settings, LABELS, seed=seed).classifier.weight for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_pretrained_weights_are_loaded(folders: dict[str, Path]) -> None:
    expected = AutoModel.from_pretrained(folders["bert"]).state_dict()
    for pooling in ("native", "mean"):
        encoder = encoder_of(build(folders["bert"], pooling=pooling)).state_dict()
        assert all(torch.equal(encoder[name], expected[name]) for name in encoder)


@pytest.mark.parametrize("pooling", ["native", "mean"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dropout_reaches_every_dropout_module(folders: dict[str, Path], architecture: str, pooling: str) -> None:
    model = build(folders[architecture], pooling=pooling, dropout=0.37)
    rates = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    assert rates == {0.37}


@pytest.mark.parametrize("pooling", ["native", "mean"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_freezing_layers(folders: dict[str, Path], architecture: str, pooling: str) -> None:
    model = build(folders[architecture], pooling=pooling, freeze_layers=1)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    first, second = encoder_layers(model)
    assert not any(p.requires_grad for p in first.parameters())
    assert all(p.requires_grad for p in second.parameters())
    assert any("embeddings" in name for name in frozen)
    assert all(p.requires_grad for name, p in model.named_parameters() if name.startswith("classifier"))


def test_a_frozen_encoder_leaves_only_the_head(folders: dict[str, Path]) -> None:
    model = build(folders["bert"], pooling="cls", freeze_encoder=True)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"classifier.weight", "classifier.bias"}


def test_more_frozen_layers_than_there_are_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="has 2 layers"):
        build(folders["bert"], freeze_layers=3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_depth_counts_up_from_embeddings_to_head(folders: dict[str, Path], architecture: str) -> None:
    depths = parameter_depth(build(folders[architecture]))
    assert set(depths.values()) == {0, 1, 2, 3}
    assert all(depth == 0 for name, depth in depths.items() if "word_embeddings" in name or "tok_embeddings" in name)
    assert depths["classifier.weight" if "classifier.weight" in depths else "classifier.out_proj.weight"] == 3


@pytest.mark.parametrize("architecture", ["bert", "roberta", "modernbert"])
def test_gradient_checkpointing_changes_no_gradient(folders: dict[str, Path], architecture: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = build(folders[architecture], pooling="mean", dropout=0.0, gradient_checkpointing=checkpointing).train()
        model(**batch()).logits.square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_longest_input(folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        settings = ModelConfig(name=str(folder))
        expected = 129 if name == "roberta" else 128
        assert longest_input(settings, load_tokenizer(settings)) == min(expected, 128), name


def test_token_types_are_fed_only_where_the_model_has_them(folders: dict[str, Path]) -> None:
    fed = {
        name: accepts_token_types(build(folder), AutoTokenizer.from_pretrained(folder))
        for name, folder in folders.items()
    }
    assert fed == {
        "bert": True, "distilbert": False, "roberta": False, "electra": True, "modernbert": False, "deberta-v2": False,
    }  # fmt: skip


def test_an_earlier_runs_model_can_be_trained_further_with_other_labels(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    for pooling in ("native", "last"):
        folder = tmp_path / pooling
        tokenizer = load_tokenizer(ModelConfig(name=str(folders["bert"])))
        save_model(build(folders["bert"], pooling=pooling), tokenizer, folder, max_length=20)
        model = build_model(ModelConfig(name=str(folder)), ("a", "b"), seed=0)
        assert model(**batch()).logits.shape == (3, 2)


@pytest.mark.parametrize("name", ["no/such-model", "/no/such/folder"])
def test_an_unknown_model_is_a_readable_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no minute of retries without a network
    with pytest.raises(ModelError, match="Give a model folder, a hub name"):
        load_tokenizer(ModelConfig(name=name))


def test_pickled_weights_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    for file in folders["bert"].iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        build(tmp_path)


def test_nothing_prints_in_forward(folders: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    model = build(folders["bert"], pooling="last")
    capfd.readouterr()
    model(**batch())
    assert capfd.readouterr() == ("", "")


def test_loading_in_a_fresh_process_by_auto_class(folders: dict[str, Path], tmp_path: Path) -> None:
    save_model(build(folders["bert"]), AutoTokenizer.from_pretrained(folders["bert"]), tmp_path, max_length=20)
    assert (
        type(AutoModelForSequenceClassification.from_pretrained(tmp_path)).__name__ == "BertForSequenceClassification"
    )
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    assert (tokenizer["truncation"], tokenizer["padding"]) == (None, None)
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == 20
