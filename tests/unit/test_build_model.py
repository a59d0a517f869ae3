"""What a model folder may get wrong, and what must not be random: weights, dropout, lengths, layers."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    AlbertConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from raytrain_bert.config.errors import ConfigError, ModelError
from raytrain_bert.config.schema import ModelConfig
from raytrain_bert.model.build import build_model, load_model, load_tokenizer, longest_input, resolve_model, save_model
from raytrain_bert.model.layers import encoder_of, parameter_depth
from tests.tiny import ARCHITECTURES, VOCABULARY, tiny_bert, tiny_model, tiny_tokenizer

IDS = torch.tensor([[2, 9, 14, 22, 40, 3]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("tiny")
    return {name: tiny_model(base / name, name) for name in ARCHITECTURES}


@pytest.fixture
def bert(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(folders["bert"], tmp_path / "bert"))


@pytest.fixture
def albert(tmp_path: Path) -> Path:
    config = AlbertConfig(
        vocab_size=len(VOCABULARY), embedding_size=16, hidden_size=16, num_attention_heads=2, num_hidden_layers=3,
        intermediate_size=16, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    AutoModel.from_config(config).save_pretrained(tmp_path / "albert")
    tiny_tokenizer().save_pretrained(tmp_path / "albert")
    return tmp_path / "albert"


def build(folder: Path, names: tuple[str, ...] = ("a", "b", "c"), **settings: object) -> PreTrainedModel:
    return build_model(ModelConfig.model_validate({"name": str(folder)} | settings), names, seed=0)


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("pooling", ["native", "mean"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_dropout_of_any_kind_is_left(folders: dict[str, Path], architecture: str, pooling: str) -> None:
    """Dropout in attention is no module; with all of it off, training and evaluation agree."""
    model = build(folders[architecture], pooling=pooling, dropout=0.0)
    assert torch.equal(model.train()(IDS).logits, model.eval()(IDS).logits)
    noisy = build(folders[architecture], pooling=pooling, dropout=0.5).train()
    assert not torch.equal(noisy(IDS).logits, noisy(IDS).logits)


@pytest.mark.parametrize("pooling", ["native", "mean"])
def test_encoder_weights_of_another_shape_are_refused(bert: Path, pooling: str) -> None:
    change_config(bert, intermediate_size=40)
    with pytest.raises(ModelError, match="6 weights are missing or have another shape"):
        build(bert, pooling=pooling)


@pytest.mark.parametrize("pooling", ["native", "mean"])
def test_encoder_weights_that_are_not_there_are_refused(bert: Path, pooling: str) -> None:
    change_config(bert, num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"weights are missing.*layer\.2\."):
        build(bert, pooling=pooling)


def test_a_damaged_file_is_a_readable_error(bert: Path) -> None:
    weights = bert / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="damaged"):
        build(bert)


def test_an_encoder_alone_is_no_classifier(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match=r"classifier.*RUN/model"):
        load_model(folders["bert"])


@pytest.mark.parametrize("pooling", ["native", "mean"])
def test_a_masked_language_model_gives_its_encoder(bert: Path, tmp_path: Path, pooling: str) -> None:
    language_model = AutoModelForMaskedLM.from_pretrained(bert)
    language_model.save_pretrained(tmp_path / "mlm")
    got, expected = encoder_of(build(tmp_path / "mlm", pooling=pooling)).state_dict(), language_model.bert.state_dict()
    assert set(expected) <= set(got)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_head_for_other_labels_is_replaced_and_the_encoder_kept(bert: Path, tmp_path: Path) -> None:
    old = AutoModelForSequenceClassification.from_pretrained(bert, num_labels=7)
    old.save_pretrained(tmp_path / "seven")
    model = build(tmp_path / "seven")
    assert model.classifier.weight.shape == (3, 32)
    assert all(torch.equal(a, b) for a, b in zip(model.bert.parameters(), old.bert.parameters(), strict=True))
    assert (model.config.id2label, model.config.label2id) == ({0: "a", 1: "b", 2: "c"}, {"a": 0, "b": 1, "c": 2})


def test_weights_in_half_precision_become_float32(bert: Path, tmp_path: Path) -> None:
    AutoModel.from_pretrained(bert, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    for pooling in ("native", "mean"):
        assert {p.dtype for p in build(tmp_path / "half", pooling=pooling).parameters()} == {torch.float32}


def test_building_and_saving_say_nothing(bert: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer, verbosity = load_tokenizer(ModelConfig(name=str(bert))), transformers_logging.get_verbosity()
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build(bert, gradient_checkpointing=True)
        save_model(model, tokenizer, tmp_path / "saved", max_length=20)
        load_model(tmp_path / "saved")
    assert capfd.readouterr() == ("", "")
    assert transformers_logging.get_verbosity() == verbosity
    assert transformers_logging.is_progress_bar_enabled()


def test_a_saved_tokenizer_cuts_as_in_training_and_not_unasked(bert: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(name=str(bert)))
    tokenizer(["good film"], truncation=True, max_length=8, padding="max_length")  # leaves both set in the backend
    save_model(build(bert), tokenizer, tmp_path / "saved", max_length=8)
    back = AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = "good film " * 10
    assert len(back(text)["input_ids"]) == 22
    assert len(back(text, truncation=True)["input_ids"]) == 8
    # AutoTokenizer resets what it finds; whoever reads tokenizer.json itself (serving in Rust) gets it applied.
    plain = Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    assert len(plain.encode(text).ids) == 22
    assert len(plain.encode("good film").ids) == 4


def test_a_tokenizer_without_padding_is_refused(bert: Path) -> None:
    backend = AutoTokenizer.from_pretrained(bert).backend_tokenizer
    for file in bert.glob("*token*"):
        file.unlink()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(bert)
    with pytest.raises(ModelError, match=r"no padding token.*Set pad_token"):
        load_tokenizer(ModelConfig(name=str(bert)))


def test_a_slow_tokenizer_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "canine"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CanineTokenizer"}))
    with pytest.raises(ModelError, match="no fast version"):
        load_tokenizer(ModelConfig(name=str(tmp_path)))


def test_robertas_longest_input_is_what_its_forward_takes(tmp_path: Path) -> None:
    """RoBERTa-base: 514 positions, padding id 1, 512 tokens; here 40, 1 and 38."""
    folder = tiny_model(tmp_path / "roberta", "roberta", pad_token_id=1, max_position_embeddings=40)
    settings = ModelConfig(name=str(folder))
    longest = longest_input(settings, load_tokenizer(settings))
    assert longest == 38
    model = build(folder).eval()
    assert model(torch.full((1, longest), 9)).logits.isfinite().all()
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, longest + 1), 9))


def test_albert_which_shares_one_layer_is_trained_like_the_others(albert: Path) -> None:
    for pooling in ("native", "mean"):
        model = build(albert, pooling=pooling).train()
        depths = parameter_depth(model)
        assert {depth for name, depth in depths.items() if "albert_layer_groups" in name} == {1}
        assert {depth for name, depth in depths.items() if "embedding" in name} == {0}
        assert depths["classifier.weight"] == 2
        model(IDS).logits.square().sum().backward()
        assert not [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    with pytest.raises(ConfigError, match="has 1 layers"):
        build(albert, freeze_layers=2)


def test_freezing_goes_up_to_the_asked_layer(folders: dict[str, Path]) -> None:
    model = build(folders["bert"], freeze_layers=2)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"}


def test_names_are_resolved(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bert.parent)
    assert resolve_model("bert") == str(bert.resolve())  # workers run in another folder
    assert resolve_model("someone/some-model") == "someone/some-model"
    with pytest.raises(ConfigError, match="bundled:all-minilm-l6-v2"):
        resolve_model("bundled:all-minilm")


def test_a_mistyped_folder_is_told_its_neighbour(bert: Path) -> None:
    with pytest.raises(ModelError, match=r"Did you mean .*bert\?"):
        build(bert.parent / "brt")


def test_tiny_models_are_the_same_each_time(tmp_path: Path) -> None:
    first, second = (AutoModel.from_pretrained(tiny_bert(tmp_path / name)).state_dict() for name in "ab")
    assert all(torch.equal(first[name], second[name]) for name in first)
