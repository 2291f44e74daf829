"""The choice of a cost model: a shipped curve, or hardware by GPU, count, model and dtype; and of a batch."""

from __future__ import annotations

import ipywidgets as w
import traitlets

from treespec.cost import CostModel, load_cost, shipped
from treespec.roofline import BYTES, known_hardware

HARDWARE = "hardware"
WORDS = {"measured": "measured here", "article": "the article's"}
COUNTS = (1, 2, 4, 8, 16)


class CostControls(w.HBox):
    """Which machine the seconds are of.

    Args:
        cost: a cost model to begin with, or the name of one.
        batch: trees in one verification.

    Attributes:
        spec: name of the cost model; ``batch`` beside it.
    """

    spec = traitlets.Unicode()

    def __init__(self, cost: CostModel | str = "measured", batch: int = 1) -> None:
        super().__init__(layout=w.Layout(flex_flow="row wrap"))
        self._given = None if isinstance(cost, str) else cost
        name = str(cost)
        curves = list(shipped())
        others = [] if name in curves else [name]
        options = [(WORDS.get(c, c), c) for c in (*curves, *others)]
        self.choice = w.Dropdown(options=[*options, ("hardware, by formula", HARDWARE)], value=name, description="cost")
        gpus, models = known_hardware()
        narrow = w.Layout(width="110px")
        self.gpu = w.Dropdown(options=gpus, value="a100", layout=narrow, tooltip="GPU")
        self.count = w.Dropdown(options=[(f"× {n}", n) for n in COUNTS], value=4, layout=w.Layout(width="70px"))
        self.model = w.Dropdown(options=models, value="70b", layout=w.Layout(width="80px"), tooltip="target model")
        self.dtype = w.Dropdown(options=list(BYTES), layout=w.Layout(width="80px"), tooltip="of the weights")
        self.batch = w.BoundedIntText(batch, min=1, max=256, description="batch", layout=w.Layout(width="130px"))
        self.choice.layout.width = "230px"
        self.choice.style.description_width = "40px"
        self.batch.style.description_width = "46px"
        self._hardware = w.HBox([self.gpu, self.count, self.model, self.dtype])
        for part in (self.choice, self.gpu, self.count, self.model, self.dtype):
            part.observe(self._tell, "value")
        self.children = (self.choice, self._hardware, self.batch)
        self._tell()

    def _tell(self, _: object = None) -> None:
        hardware = self.choice.value == HARDWARE
        self._hardware.layout.display = "" if hardware else "none"
        made = f"{self.gpu.value}x{self.count.value}:{self.model.value}@{self.dtype.value}"
        self.spec = made if hardware else self.choice.value

    @property
    def cost(self) -> CostModel:
        """The cost model chosen.

        Raises:
            InputError: for hardware that the model does not fit into.
        """
        if self._given is not None and self.spec == str(self._given):
            return self._given
        return load_cost(self.spec)
