"""Follow the unquantized model beside the quantized one, block by block."""

from __future__ import annotations

from quantkit.calibration.activations import Activations
from quantkit.calibration.budget import gradient_documents
from quantkit.calibration.run import Run, Stream, embedded
from quantkit.calibration.stages.base import LoadedBlock, Stage


class Unquantized(Stage):
    """Hold the activations of the unquantized model: the inputs of a block, and then its outputs.

    Tuning needs all documents, gradients only the first ones.
    """

    activations: Activations

    def start(self, run: Run, finished: int) -> None:
        """Run the documents through the finished blocks."""
        count = None if run.recipe.tune else gradient_documents(map(len, run.sequences))
        stream = embedded(run, count, "unquantized-")
        for index in range(finished):
            with run.clock.phase("load"):
                run.model.load_block(index)
            stream.forward(index)
            run.model.unload_block(index)
        self.activations = stream.activations

    def enter(self, block: LoadedBlock) -> None:
        """Run the documents through a block before its weights are quantized."""
        self.stream(block.run).forward(block.index)

    def stream(self, run: Run, count: int | None = None) -> Stream:
        """Stream all documents, or the first `count`; a GPU without memory for a block may have it for the next."""
        return Stream(run, self.activations, count)
