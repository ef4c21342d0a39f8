"""Lets SGLang run on a CPU without AMX. A `.pth` file beside it imports it whenever Python starts. For tests only.

Light: torch is not imported until `sglang` or `torchvision` is, so that every process which SGLang spawns has the
patches too and every other one costs nothing.
"""

import os
import sys
from importlib.abc import MetaPathFinder

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")


class _Patch(MetaPathFinder):
    """Finds nothing; patches once, before the first import of what needs it."""

    kept = None

    def find_spec(self, name, path=None, target=None):
        if name in ("sglang", "torchvision"):
            sys.meta_path.remove(self)
            self.patch()

    def patch(self):
        import torch

        # torchvision's own library does not load beside a CPU build of torch, and these two must be declared
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        type(self).kept = library
        if os.environ.get("SGL_CPU_NO_PIN") == "1":  # adapters want pinned memory, which a CPU build refuses
            for name in ("empty", "zeros", "ones", "full", "tensor"):
                setattr(torch, name, _unpinned(getattr(torch, name)))
            torch.Tensor.pin_memory = lambda tensor, *args, **kwargs: tensor


def _unpinned(make):
    def made(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)

    return made


sys.meta_path.insert(0, _Patch())
