"""Equivariant tensor products: e3nn's instructions to statements, all of them run as one node of autograd.

`plan` calls all the others: read it first, and then from the top. A file imports only from those above it.

What a product is made of:

    clebsch_gordan  irreps as e3nn reads them, and its coefficients
    constants       tensors that never change, and their copies in each device's memory
    paths           instructions, checked and normalised, and the letters of their modes
    slots           columns of irreps to tensors [b, component, channel], and back

Its terms: the statements for paths that are alike, with their tables:

    channels        weights for each sample; the coefficients are numbers in a kernel's source
    terms           the plain one, for every mode; one by output component, where channels never mix
    multilinear     a statement around fixed coefficients, which are grouped anew for each gradient
    path_tables     weights for each sample, channels that mix; the coefficients of a path in a dense table, or numbers
    tables          its terms, also for columns where they lie
    singles         weights for each sample, inputs of one channel
    shared          weights that all samples share, in two statements
    scalars         a second input of scalars that is sparse
    kinds           a second input of scalars that is dense

All terms as one node of autograd:

    pieces          which of the flat weights each term reads where they are
    steps           what a term does in one call, forward and backward, its statements made ready
    format_steps    the same for terms whose coefficients are in a format
    whole           all steps, and what stands between them, for tensors of one layout
    node            the node, and where gradients are differentiated in turn

The product:

    plan            which terms, over which slots, with which part of the weights
    product         `tensor_product`: checks and broadcasting around a plan
"""

from .product import tensor_product

__all__ = ["tensor_product"]
