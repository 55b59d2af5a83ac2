"""Machines that can be simulated: measured steps, and the limits that a server has there."""

from __future__ import annotations

from dataclasses import dataclass

from tokenpod.scheduler.steps.machine_times import MachineTimes, StepSize, fitted


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a device.

    Args:
        name: what it is, in words.
        measured: steps and their seconds.
        slots: tokens that the KV cache holds.
        max_rows: sequences that run at once, by default.
        prefill_tokens: prompt tokens of a step, by default.
        gap_ms: that a step with prompts may take while others stream, by default.
        positions: longest sequence.
        overlap: whether a step is planned while the one before runs.
        slot_bytes: of a token's keys and values.
        copy_rate: bytes per second between them and the host's memory, one way at a time.
    """

    name: str
    measured: list[tuple[StepSize, float]]
    slots: int
    max_rows: int
    prefill_tokens: int
    gap_ms: float
    positions: int
    overlap: bool
    slot_bytes: int
    copy_rate: float

    @property
    def step_times(self) -> MachineTimes:
        """The model of its steps' times."""
        return fitted(self.measured)


_rows, _prompt = StepSize.of_rows, StepSize.of_prompt

#: An 8B Llama shape in bfloat16 on one H200. Decode steps are those of docs/measurements/gpu.md
#: ("Beside vLLM"); prompts are its TFLOP/s turned back into time with the operations that
#: benchmarks/support/limits.py counts: 2 * 6.98e9 for a token, 4 * 4096 * 32 for a pair; the mixed
#: step is of benchmarks/NOTES.md ("The loop"), whose rows had some 400 tokens. The cache is 0.9 of
#: what 16 GB of weights leave of 139 GiB, at 128 KiB a token.
_H200 = Machine(
    name="an 8B Llama shape in bfloat16 on one NVIDIA H200",
    measured=[
        (_rows(1, 256), 3.82e-3),
        (_rows(64, 1024), 6.55e-3),
        (_rows(16, 8192), 8.15e-3),
        (_rows(256, 512), 11.7e-3),
        (_prompt(2048), 48.5e-3),
        (_prompt(8192), 217e-3),
        (_prompt(32_768), 1.272),
        (StepSize(200, 80_000, 128, 128 * 64), 11.5e-3),
    ],
    slots=900_000,
    max_rows=1024,
    prefill_tokens=4096,
    gap_ms=120.0,
    positions=131_072,
    overlap=True,
    slot_bytes=128 << 10,
    # Not measured: what is usual for the 63 GB/s of PCIe 5.0 x16.
    copy_rate=50e9,
)

#: The embedded model in float32 on one thread of a two-core machine that others used too
#: (`benchmarks/policies.py steps` at 487f27e9, 23 November 2026, whole turns of the loop, the least
#: of 15 decode steps and of 8 prompts each).
_CPU = Machine(
    name="the embedded model in float32 on one CPU thread",
    measured=[
        (StepSize(1, 72), 9.513e-3),
        (StepSize(8, 576), 15.04e-3),
        (StepSize(32, 2304), 26.15e-3),
        (StepSize(64, 4608), 40.51e-3),
        (StepSize(1, 1032), 12.21e-3),
        (StepSize(16, 16_512), 76.99e-3),
        (StepSize(32, 33_024), 114.5e-3),
        (_prompt(32), 25.98e-3),
        (_prompt(128), 66.29e-3),
        (_prompt(512), 261.3e-3),
        (_prompt(1024), 506.1e-3),
    ],
    slots=131_072,
    max_rows=64,
    prefill_tokens=512,
    gap_ms=100.0,
    positions=2048,
    overlap=False,
    slot_bytes=8 << 10,
    # Copies are memory to memory there; of a single thread, not measured.
    copy_rate=2e9,
)

#: --gpu.
MACHINES = {"h200": _H200, "cpu": _CPU}
