"""Exact colour as one DALI operator of our own: on a CPU the pixels of `pipelines.dali.color` to the bit, sooner.

    python -m pipelines.dali.plugin          # compiles it, holds it against DALI's own operators, keeps it
    python -m pipelines.dali.plugin --gpu    # the same for a GPU, two launches a batch; NOT YET RUN ON ONE

DALI's graph has no operator for contrast about an image's own mean, nor for hue in HSV, and its arithmetic takes one
pass over memory an operation ("Complex expression trees are not yet supported", says 2.4 to an expression of two). Here
an image goes through all factors in pieces that stay in the processor's first cache.

Nothing is compiled by a run. DALI's headers take a compiler some ten seconds, and every rank of a job would start one;
who wants the operator builds it once, by the command above. A run uses what it finds (`data.color_operator: auto`),
which changes no pixel: what does not agree with DALI to the bit is never kept.

The GPU's is used where it is asked for (`data.color_operator: plugin`), and only then: it has not been timed, and its
pixels are those of a CPU, from which DALI's GPU operators differ in their rounding.
"""
