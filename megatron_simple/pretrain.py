"""Pretraining: parse the flags, make the mesh, the data, the engine, restore, train.

torchrun --nproc-per-node N -m megatron_simple.pretrain [flags]      or python -m megatron_simple.pretrain for one process
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_simple.arguments import YAML_FILE, parse_config, write_yaml
from megatron_simple.checkpoint.format import complete_checkpoints, find_checkpoint
from megatron_simple.checkpoint.tokenizer_copy import TokenizerCopy
from megatron_simple.checks import resolve
from megatron_simple.config import Config, ConfigError, ModelConfig
from megatron_simple.parallel.mesh import (
    Mesh,
    Process,
    build_mesh,
    discover_process,
    record_failure,
    start_distributed,
    stop_distributed,
)

# How long other ranks hold their own message back: a fault of the user's is the same everywhere, and rank 0 tells it.
RANK_0_FIRST_SECONDS = 3.0

# Model settings that may differ between a checkpoint and the run that loads it.
FREE_MODEL_SETTINGS = (
    "model",
    "max_position_embeddings",
    "make_vocab_size_divisible_by",
    "norm_placement",
    "norm_sites",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when the promised training (and checkpoint) is done; 1 with one sentence on stderr otherwise."""
    process = discover_process()
    try:
        run(parse_config(arguments, description=__doc__.split("\n")[0]), process)
        return 0
    except (ValueError, OSError) as error:
        report(process, f"error: {error}")
    except Exception:
        report(process, traceback.format_exc())
    finally:
        stop_distributed()
    return 1


def report(process: Process, text: str) -> None:
    """Rank 0 speaks at once; another rank waits, as the launcher ends it when rank 0 has failed of the same cause."""
    if process.rank > 0:
        time.sleep(RANK_0_FIRST_SECONDS)
        text = f"[rank {process.rank}] {text}"
    print(text, file=sys.stderr, flush=True)
    record_failure(text)


def run(given: Config, process: Process) -> None:
    config = resolve(given, world_size=process.world_size)
    tokenizer = read_tokenizer(config)
    config = with_vocabulary(config, tokenizer)
    source = checkpoint_source(config)
    if process.rank == 0:
        make_folders(config)
    device = start_distributed(process, timeout_minutes=config.parallel.distributed_timeout_minutes)
    mesh = build_mesh(config.parallel, process, device)
    source = mesh.from_writer(source)

    from megatron_simple.training.loop import StopSignal, train  # DeepSpeed takes seconds to import
    from megatron_simple.training.metrics import Metrics, say

    say_once = say if mesh.is_writer else (lambda text: None)
    sets = build_data(config, mesh, say_once)
    engine, state = build_engine(config, mesh, source, say_once)
    metrics = Metrics(config, start_iteration=state.iteration, active=mesh.is_writer)
    if mesh.is_writer and config.log.log_dir:
        write_yaml(dataclasses.replace(config, model=as_given(given, config)), Path(config.log.log_dir) / YAML_FILE)
    if state.iteration >= config.training.train_iters:
        say_once(f"nothing to do: iteration {state.iteration} of {config.training.train_iters} is already done")
    loader, make_validation = build_loaders(config, mesh, sets, state)
    with contextlib.closing(metrics), StopSignal() as stop:
        train(
            config,
            mesh=mesh,
            engine=engine,
            loader=loader,
            make_validation=make_validation,
            state=state,
            metrics=metrics,
            save=saver(config, mesh, engine, tokenizer, say_once) if config.save.save else None,
            stop=stop,
        )


def make_folders(config: Config) -> None:
    """Finds out before the first step, not at the first save, that a folder cannot be written."""
    for flag, folder in (("--save", config.save.save), ("--log-dir", config.log.log_dir)):
        if folder is None:
            continue
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(f"{flag} {folder}: cannot be written: {error.strerror}") from error


def as_given(given: Config, resolved: Config) -> ModelConfig:
    """What config.yaml keeps of the model: sizes as the user gave them, so that other flags can still change what follows
    from them, with the vocabulary found."""
    return dataclasses.replace(given.model, vocab_size=resolved.model.vocab_size)


def read_tokenizer(config: Config) -> TokenizerCopy | None:
    """The tokenizer of the flags; None when no --tokenizer-type is given."""
    names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern")
    given = {name: getattr(config.data, name) for name in names if getattr(config.data, name) is not None}
    if given and "tokenizer_type" not in given:
        raise ConfigError(f"--{next(iter(given)).replace('_', '-')} needs --tokenizer-type")
    return TokenizerCopy.read(given) if given else None


def with_vocabulary(config: Config, tokenizer: TokenizerCopy | None) -> Config:
    """Fills in the vocabulary from the tokenizer; a model with fewer rows than the tokenizer has ids is refused."""
    size = config.model.vocab_size
    if tokenizer is None:
        if size is None:
            raise ConfigError("give --vocab-size, or --tokenizer-type with its files, so that the vocabulary is known")
        return config
    ids = tokenizer.vocab_size
    if size is not None and ids > size:
        raise ConfigError(
            f"the tokenizer has {ids} ids, but the model only {size} rows (--vocab-size {size}"
            + (f", from --model {config.model.model}" if config.model.model else "")
            + f"); give --vocab-size {ids}, or the tokenizer that the model was made for"
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size or ids))


def checkpoint_source(config: Config) -> str | None:
    """The checkpoint folder to start from; None for a fresh run. A --load that finds nothing is fatal."""
    if config.save.resume:
        found, skipped = complete_checkpoints(Path(config.save.save))
        for reason in skipped:
            print(f"--resume passes over an unusable checkpoint: {reason}", file=sys.stderr, flush=True)
        if found:
            return str(found[-1])
    if config.save.load:
        return str(find_checkpoint(config.save.load))
    return None


def build_data(config: Config, mesh: Mesh, say_once: Callable[[str], None]) -> tuple[Any, Any, Any]:
    """Training, validation and test sets. One rank per node builds the sample indices, then the others read them."""
    from megatron_simple.data.blended_dataset import build_split_datasets

    training = config.training
    settings = {
        "data_path": _list(config.data.data_path),
        "split": config.data.split,
        "train_data_path": _list(config.data.train_data_path),
        "valid_data_path": _list(config.data.valid_data_path),
        "seq_length": training.seq_length,
        "num_samples": (
            training.train_iters * training.global_batch_size,
            config.log.eval_iters * training.global_batch_size,
            0,
        ),
        "seed": training.seed,
        "cache_path": config.data.data_cache_path,
    }
    sets = build_split_datasets(**settings, build=True) if mesh.is_node_owner else None
    mesh.barrier()
    sets = sets or build_split_datasets(**settings, build=False)
    for name, dataset in zip(("training", "validation"), sets, strict=False):
        if dataset is not None:
            say_once(f"{name} data\n{dataset.describe()}")
    return sets


def _list(paths: tuple[str, ...] | None) -> list[str] | None:
    return None if paths is None else list(paths)


def build_engine(config: Config, mesh: Mesh, source: str | None, say_once: Callable[[str], None]) -> tuple[Any, Any]:
    """The engine, restored from `source` if there is one, and where the run stands."""
    from megatron_simple.checkpoint.reader import CheckpointReader
    from megatron_simple.checkpoint.save_load import load_checkpoint
    from megatron_simple.training.engine import Engine
    from megatron_simple.training.loop import TrainState
    from megatron_simple.training.optimizer import pieces, set_weight

    engine = Engine(config, mesh)
    say_once(
        f"{mesh.process.world_size} ranks: PP {mesh.pp.size} x DP {mesh.dp.size} x TP {mesh.tp.size} on "
        f"{mesh.device.type}; {engine.describe()}"
    )
    state = TrainState()
    if source is not None:
        with CheckpointReader(source) as reader:
            same_model(config.model, reader.config.model, source)
            load_checkpoint(
                reader,
                engine.module,
                pieces(engine),
                set_weight=lambda parameter, shard: set_weight(engine, parameter, shard),
                whole=mesh.pp.size == 1,
            )
            state = TrainState(reader.iteration, reader.consumed_samples)
            kind = "weights and optimizer" if reader.has_moments else "weights"
        say_once(f"loaded {kind} of iteration {state.iteration} from {source}")
    return engine, state


def same_model(wanted: ModelConfig, saved: ModelConfig, source: str) -> None:
    """Refuses settings that would silently make another model of the same weights."""
    for setting in dataclasses.fields(ModelConfig):
        ours, theirs = getattr(wanted, setting.name), getattr(saved, setting.name)
        if setting.name not in FREE_MODEL_SETTINGS and ours != theirs:
            flag = "--" + setting.metadata.get("flag", setting.name).replace("_", "-")
            raise ConfigError(f"{flag} is {ours}, but {source} was trained with {theirs}; give the same")


def build_loaders(config: Config, mesh: Mesh, sets: tuple[Any, Any, Any], state: Any) -> tuple[Any, Callable[[], Any] | None]:
    """The training loader at the run's position, and a maker of validation loaders, each from the start."""
    from megatron_simple.data.loader import BatchLoader

    settings = {
        "micro_batch_size": config.training.micro_batch_size,
        "global_batch_size": config.training.global_batch_size,
        "data_parallel_rank": mesh.dp.rank,
        "data_parallel_size": mesh.dp.size,
        "vocab_size": config.model.vocab_size,
    }
    train_set, valid_set, _ = sets
    loader = BatchLoader(train_set, **settings, consumed_samples=state.consumed_samples)
    if valid_set is None or config.log.eval_iters == 0:
        return loader, None
    return loader, lambda: BatchLoader(valid_set, **settings)


def saver(
    config: Config, mesh: Mesh, engine: Any, tokenizer: TokenizerCopy | None, say_once: Callable[[str], None]
) -> Callable[[Any], None]:
    from megatron_simple.checkpoint.save_load import save_checkpoint
    from megatron_simple.training.optimizer import pieces

    def save(state: Any) -> None:
        begun = time.perf_counter()
        folder = save_checkpoint(
            config.save.save,
            pieces(engine),
            mesh=mesh,
            config=config,
            iteration=state.iteration,
            consumed_samples=state.consumed_samples,
            tokenizer=tokenizer,
        )
        say_once(f"saved {folder} in {time.perf_counter() - begun:.1f} s")

    return save


if __name__ == "__main__":
    sys.exit(main())
