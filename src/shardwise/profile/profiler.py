"""FLOP profiles without an engine: `get_model_profile` for one call, `FlopsProfiler` for any code between two calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import UsageError
from shardwise.profile.counting import FlopCount
from shardwise.profile.report import aggregated, report, summary, write
from shardwise.profile.tree import ModuleProfile, Numel, profile_of
from shardwise.profile.words import duration_to_string, flops_to_string, macs_to_string, params_to_string


class FlopsProfiler:
    """Counts and times a model's FLOPs between `start_profile` and `stop_profile`.

    Hooks are on the modules meanwhile. Operators are counted on this thread and in backward passes that it starts.

    Args:
        model: the model. With an engine, `engine.module`.
        ds_engine: the engine, for the sizes of sharded parameters.
        recompute_fwd_factor: assumed number of recomputed forward passes, for the rule in the report; actual
            recomputation is counted in any case.

    Raises:
        UsageError: `model` is no module, or the factor is below 0.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> profiler = FlopsProfiler(model)
        >>> profiler.start_profile()
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> profiler.stop_profile()
        >>> profiler.get_total_flops(), profiler.get_total_macs(), profiler.get_total_params()
        (48, 24, 15)
        >>> profiler.profile.backward
        48
        >>> profiler.end_profile()
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"FlopsProfiler(model): expected a torch.nn.Module, found {type(model).__name__}")
        if recompute_fwd_factor < 0:
            raise UsageError(f"FlopsProfiler(recompute_fwd_factor={recompute_fwd_factor!r}): expected 0 or more")
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self._numel: Numel = nn.Parameter.numel if ds_engine is None else ds_engine.sharded.registry.numel_of
        self._count: FlopCount | None = None
        self._counting = contextlib.ExitStack()
        self._begun = self._duration = 0.0
        self._profile: ModuleProfile | None = None

    @property
    def profile(self) -> ModuleProfile:
        """The last profile; raises a UsageError without one."""
        if self._profile is None:
            raise UsageError("nothing has been profiled: call start_profile(), run the model, and call stop_profile()")
        return self._profile

    def start_profile(self, ignore_list: Collection[type[nn.Module]] | None = None) -> None:
        """Discard earlier counts and start counting, without the module classes in `ignore_list`.

        Raises:
            UsageError: the profiler runs already, or the list contains something other than module classes.
        """
        if self._count is not None:
            raise UsageError("start_profile(): it has been started; call stop_profile() first")
        self._count = FlopCount(self.model, classes_in(ignore_list, "start_profile(ignore_list=...)"))
        self._count.start()
        self._counting.enter_context(self._count.counting())
        self._begun = time.perf_counter()

    def stop_profile(self) -> None:
        """Stop counting and remove the hooks; do nothing if not started."""
        if self._count is None:
            return
        count, self._count = self._count, None
        self._counting.close()
        count.stop()
        self._profile = profile_of(count, self._numel)
        self._duration = time.perf_counter() - self._begun

    def reset_profile(self) -> None:
        """Stop counting and discard the profile."""
        self.stop_profile()
        self._profile = None

    end_profile = reset_profile

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Return the FLOPs of forward passes."""
        flops = self.profile.forward
        return flops_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Return the multiply-accumulate operations of forward passes."""
        macs = self.profile.macs
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Return the seconds of the model's forward passes, or of the whole profile if the model was not called."""
        seconds = self.profile.seconds or self._duration
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Return the number of parameters."""
        parameters = self.profile.parameters
        return params_to_string(parameters) if as_string else parameters

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the profile of step `profile_step`, or write it to a file; arguments as of `get_model_profile`."""
        head = summary(
            self.profile,
            title=f"profile of {type(self.model).__name__} at step {profile_step}",
            recompute_factor=self.recompute_fwd_factor,
        )
        lines = report(self.profile, head, depth=module_depth, top=top_modules, detailed=detailed)
        write(lines, output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the most expensive module classes of each depth; arguments as of `print_model_profile`."""
        write(aggregated(self.profile, module_depth, top_modules), None)


def classes_in(given: Collection[Any] | None, where: str) -> tuple[type[nn.Module], ...]:
    """Return module classes as a tuple; raises a UsageError that names `where` for other objects."""
    found = tuple(given or ())
    for one in found:
        if not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise UsageError(f"{where}: expected classes of modules, such as torch.nn.Linear, found {one!r}")
    return found


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Collection[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Run a model once without gradients and return its FLOPs, multiply-accumulate operations (MACs) and parameters.

    Args:
        model: the model, in its current evaluation or training mode.
        input_shape: shape of the only argument, a tensor of ones in the dtype and on the device of the parameters.
        args: the arguments, without `input_shape`.
        kwargs: the keyword arguments, without `input_shape`.
        print_profile: print the profile.
        detailed: list every module.
        module_depth: maximum depth of listed modules; -1: all.
        top_modules: number of module classes listed for each depth.
        warm_up: calls before the profiled one.
        as_string: return strings with units, not numbers.
        output_file: file to write instead of standard output.
        ignore_modules: module classes to exclude.
        mode: "forward" calls the model, "generate" its method `generate`.

    Raises:
        UsageError: arguments are invalid, missing or given twice.

    Example:
        >>> import torch
        >>> get_model_profile(torch.nn.Linear(1000, 500), (8, 1000), print_profile=False)
        ('8.00 MFLOPS', '4.00 MMACs', '500.50 K')
    """
    profiler = FlopsProfiler(model)
    given, named = _arguments(model, input_shape, args, kwargs)
    run = _runner(model, mode)
    if warm_up < 0:
        raise UsageError(f"get_model_profile(warm_up={warm_up}): expected 0 or more calls")
    ignored = classes_in(ignore_modules, "get_model_profile(ignore_modules=...)")
    with torch.no_grad():
        for _ in range(warm_up):
            run(*given, **named)
        profiler.start_profile(ignored)
        try:
            run(*given, **named)
        finally:
            profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )


def _arguments(
    model: nn.Module, shape: Sequence[int] | None, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if shape is None:
        if not args and not kwargs:
            raise UsageError("get_model_profile(): give input_shape, or args and kwargs, with which to call the model")
        return args, kwargs or {}
    if args or kwargs:
        raise UsageError("get_model_profile(): give input_shape, or args and kwargs, but not both")
    if not isinstance(shape, Sequence) or not shape or not all(isinstance(n, int) and n > 0 for n in shape):
        raise UsageError(
            f"get_model_profile(input_shape={shape!r}): expected a tuple of sizes above 0, as (8, 3, 32, 32)"
        )
    like = next(
        (parameter for parameter in model.parameters() if parameter.is_floating_point()), torch.empty(0, device="cpu")
    )
    return [torch.ones(tuple(shape), dtype=like.dtype, device=like.device)], {}


def _runner(model: nn.Module, mode: str) -> Callable[..., Any]:
    if mode == "forward":
        return model
    if mode != "generate":
        raise UsageError(f'get_model_profile(mode={mode!r}): expected "forward" or "generate"')
    found = getattr(model, "generate", None)
    if not callable(found):
        raise UsageError(f'get_model_profile(mode="generate"): {type(model).__name__} has no method generate')
    return found
