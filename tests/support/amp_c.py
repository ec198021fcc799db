"""A stand-in of apex's `amp_C` in torch's operators that follows its contract: csrc/ of github.com/NVIDIA/apex."""

import torch


class StandIn:
    """The two kernels that LARS uses; `calls` names those that ran."""

    def __init__(self):
        self.calls = []

    def multi_tensor_l2norm(self, chunk, flag, lists, per_tensor):
        check(chunk, flag, lists)
        self.calls.append("l2norm")
        norms = torch.stack([x.norm() for x in lists[0]])
        if not norms.isfinite().all():
            flag.fill_(1)  # and goes on
        return norms.norm().view(1), norms if per_tensor else norms[:0]

    def multi_tensor_sgd(self, chunk, flag, lists, wd, momentum, dampening, lr, nesterov, *options):
        check(chunk, flag, lists)
        # pybind takes no tensor for a float.
        assert all(type(x) is float for x in (wd, momentum, dampening, lr)) and type(nesterov) is bool
        # LARS has no first run, no decay after the momentum, and gradients as they are.
        assert dampening == 0 and repr(options) == "(False, False, 1.0)"
        self.calls.append("sgd")
        if flag.item():
            return
        for g, w, b in zip(*lists):
            step = g + wd * w
            if momentum:
                b.mul_(momentum).add_(step)
                step = step + momentum * b if nesterov else b
            w.sub_(lr * step)


def check(chunk, flag, lists):
    """Require what every kernel of apex asks of its tensors."""
    assert isinstance(chunk, int) and flag.dtype == torch.int32 and flag.shape == (1,)
    for tensors in zip(*lists, strict=True):
        for x in tensors:
            dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
            assert dense and x.dtype == torch.float32 and x.numel() == tensors[0].numel()
