"""Exact color as one DALI operator: the pixels of `pipelines.dali.color` to the bit, faster.

    python -m pipelines.dali.plugin          # compile it for the CPU, compare it with DALI's operators, keep it
    python -m pipelines.dali.plugin --gpu    # the same for a GPU, two launches a batch; not yet run on a GPU

DALI has no operator for contrast about an image's own mean nor for hue in HSV, and its arithmetic makes one pass over
memory for each operation. This operator takes an image through all factors in pieces that fit the processor's first
cache.

A run compiles nothing: DALI's headers cost a compiler about ten seconds, and every rank of a job would pay them. The
command above builds the operator once, and `data.color_operator: auto` uses it where it was built. A build that does
not agree with DALI's CPU operators to the bit is not kept, so using it changes no pixel on a CPU.

On a GPU only `data.color_operator: plugin` uses it, because it has not been timed there. Its pixels are those of a CPU;
DALI's own GPU operators round differently.
"""
