"""A view from its resized image on as one DALI operator: the values of `pipelines.dali.graphs` to the bit, faster.

    python -m pipelines.dali.view_operator              # compile it, compare it with DALI's, keep it for this user
    python -m pipelines.dali.view_operator --prebuilt   # the same for all users of this installation, as in an image

It computes color, gray, blur, flip and normalization. DALI has no operator for contrast about an image's own mean nor
for hue in HSV, its arithmetic makes one pass over memory for each operation, and its blur is not vectorized. This
operator takes an image through all factors in pieces that fit the processor's first cache, and blurs row by row.

A wheel cannot carry it, because it is compiled against one version of DALI. `make` runs the command above where there
is a compiler, which takes about ten seconds; else the first run does. The Docker build runs it in a stage with a
compiler, and fails with it. A build that does not agree with DALI's CPU operators to the bit is not kept, so using it
changes no value on a CPU.

On a GPU it makes two launches a batch, of kernels that NVRTC compiles for that card. Before its first batch its values
are compared with those on the CPU. They differ at most by one level, in images of more than 65,536 pixels.
"""
