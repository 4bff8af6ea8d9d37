"""Follow the unquantized model beside the quantized one, block by block."""

from __future__ import annotations

from quantkit.calibration.activations import Activations
from quantkit.calibration.run import Run, Stream, embedded
from quantkit.calibration.stages.base import LoadedBlock, Stage


class Unquantized(Stage):
    """Hold the activations of the unquantized model: the inputs of a block, and then its outputs."""

    activations: Activations

    def start(self, run: Run, finished: int) -> None:
        """Run the documents through the finished blocks."""
        stream = embedded(run, kind="unquantized-")
        for index in range(finished):
            with run.clock.phase("load"):
                run.model.load_block(index)
            stream.forward(index)
            run.model.unload_block(index)
        self.activations = stream.activations

    def enter(self, block: LoadedBlock) -> None:
        """Run the documents through a block before its weights are quantized."""
        # A GPU without memory for a block may have it for the next, so each block has a new stream.
        Stream(block.run, self.activations).forward(block.index)
