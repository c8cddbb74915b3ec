"""Flags and YAML files, derived from the settings of config.py.

A setting `some_name` is the flag `--some-name`; a boolean is a flag without a value, with its opposite where
`unset` names one. Nothing here knows a setting by name, but for `--model` and `--recipe`, which lay a size and a run of
zoo.py under the flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_simple import zoo
from megatron_simple.config import Config, ConfigError, ModelConfig, from_dict

YAML_FILE = "config.yaml"

# Giving one of a pair on the command line takes the place of the other in a --config file.
EITHER_OR = (("train_iters", "train_tokens"), ("data_path", "train_data_path"))


class _Parser(argparse.ArgumentParser):
    """Wrong flags raise ConfigError, so that they end like every other error of the user's."""

    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(f"{message} (see --help)")


def add_settings(parser: argparse.ArgumentParser, sections: Sequence[str]) -> None:
    """Adds one flag per setting of the named sections of Config; a flag not given leaves no attribute."""
    for section in dataclasses.fields(Config):
        if section.name not in sections:
            continue
        group = parser.add_argument_group(section.name)
        kinds = typing.get_type_hints(section.default_factory)
        for setting in dataclasses.fields(section.default_factory):
            _add_flag(group, setting, kinds[setting.name])


def _add_flag(group: Any, setting: dataclasses.Field, kind: Any) -> None:
    metadata = setting.metadata
    flag = "--" + metadata.get("flag", setting.name).replace("_", "-")
    default = "" if setting.default is None else f" (default: {setting.default})"
    common = {"dest": setting.name, "default": argparse.SUPPRESS, "help": metadata["help"] + default}
    value_type, is_tuple = _value_type(kind)
    if value_type is bool:
        group.add_argument(flag, action="store_const", const=True, **common)
        if "unset" in metadata:
            opposite = {**common, "help": f"the opposite of {flag}"}
            group.add_argument("--" + metadata["unset"].replace("_", "-"), action="store_const", const=False, **opposite)
        return
    common["metavar"] = setting.name.upper().split("_")[-1]
    if is_tuple and not metadata.get("many"):
        common["type"] = _comma_separated(value_type)
    else:
        common["type"] = value_type
    if metadata.get("many"):
        common["nargs"] = "+"
    if "choices" in metadata:
        common["choices"] = metadata["choices"]
        del common["metavar"]
    group.add_argument(flag, **common)


def _value_type(kind: Any) -> tuple[type, bool]:
    """(element type, whether several values are taken) of an annotation such as `tuple[int, ...] | None`."""
    if isinstance(kind, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not types.NoneType)
    if typing.get_origin(kind) is tuple:
        return typing.get_args(kind)[0], True
    return kind, False


def _comma_separated(value_type: type) -> typing.Callable[[str], tuple]:
    def parse(text: str) -> tuple:
        return tuple(value_type(part) for part in text.split(",") if part)

    parse.__name__ = f"comma-separated {value_type.__name__} list"
    return parse


def parse_config(arguments: Sequence[str] | None = None, *, description: str = "") -> Config:
    """The Config of a command line: defaults, `--config FILE`, the size of `--model`, the run of `--recipe`, the flags."""
    parser = _Parser(prog="megatron_simple.pretrain", description=description, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="config.yaml of an earlier run; flags override it")
    parser.add_argument(
        "--recipe",
        choices=tuple(zoo.RECIPE_VARIANTS),
        help="batch, length, steps and optimiser settings of the paper's run of --model, as its text or its released code "
        f"has them (models: {', '.join(zoo.RECIPES)}); flags override it",
    )
    add_settings(parser, [f.name for f in dataclasses.fields(Config)])
    given = vars(parser.parse_args(arguments))
    file, variant = given.pop("config"), given.pop("recipe")
    base = read_yaml(file) if file else Config()
    if variant is not None:
        given = {**_recipe(variant, config_from(given, base=base).model, given), **given}
    return config_from(given, base=base)


def _recipe(variant: str, model: ModelConfig, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of the paper's run of this model; a length given in tokens takes the place of its number of steps."""
    if model.model not in zoo.RECIPES:
        raise ConfigError(f"--recipe {variant} needs the --model of one of the paper's runs: {', '.join(zoo.RECIPES)}")
    settings = zoo.recipe(model.model, variant, norm_placement=model.norm_placement)
    if "lr" not in {**settings, **given}:
        raise ConfigError(f"--recipe {variant}: the paper prints no learning rate for {model.model}; give --lr")
    if "train_tokens" in given:
        del settings["train_iters"]
    return settings


def config_from(given: dict[str, Any], *, base: Config | None = None) -> Config:
    """`base` (or the defaults) with the size behind `given["model"]` and the given settings laid over it."""
    base = base or Config()
    for one, other in (*EITHER_OR, *(pair[::-1] for pair in EITHER_OR)):
        if one in given and other not in given:
            given = {**given, other: None}
    size = zoo.MODELS[given["model"]] if given.get("model") else {}
    sections = {}
    for section in dataclasses.fields(Config):
        current = getattr(base, section.name)
        if isinstance(current, ModelConfig) and size:
            current = ModelConfig()
        names = {f.name for f in dataclasses.fields(current)}
        values = {name: value for name, value in {**size, **given}.items() if name in names}
        tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        sections[section.name] = dataclasses.replace(current, **tuples)
    return Config(**sections)


def read_yaml(path: str | Path) -> Config:
    """The Config of a config.yaml; ConfigError naming the file when it is missing or no such file."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(v, dict) for v in values.values()):
        raise ConfigError(f"--config {path}: expected sections with settings, as a run's {YAML_FILE} has them")
    return from_dict(values, source=f"--config {path}")


def write_yaml(config: Config, path: Path) -> None:
    path.write_text(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True), encoding="utf-8")
