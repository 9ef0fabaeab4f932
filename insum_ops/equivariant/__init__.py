"""Equivariant tensor products: e3nn's instructions to statements, all of them run as one node of autograd.

`decomposition` calls all those above it: read it first, and then from the top. A file imports only from those above it.

What a product is made of:

    clebsch_gordan  irreps as e3nn reads them, and its coefficients
    constants       tensors that never change, and their copies in each device's memory
    paths           instructions, checked and normalised, and the letters of their modes
    slots           columns of irreps to tensors [b, component, channel], and back
    choice          the faster of several ways to one result: timed once, and remembered
    contraction     any tensor of a product from its others, as one autograd function

Its terms: the statements for paths that are alike, with their tables:

    channels        weights for each sample; the coefficients are numbers in a kernel's source
    terms           the plain one, for every mode; one by output component, where channels never mix
    multilinear     a statement around fixed coefficients, which are grouped anew for each gradient
    path_tables     weights for each sample, channels that mix; the coefficients of a path in a dense table, or numbers
    table_terms     its terms, also for columns where they lie
    single_channel  weights for each sample, inputs of one channel
    shared_weights  weights that all samples share, in two statements
    sparse_scalars  a second input of scalars that is sparse
    species         a second input of scalars that is dense

All terms as one node of autograd:

    weight_slices     which of the flat weights each term reads where they are
    term_statements   what a term does in one call, forward and backward: its statements
    in_place          all terms of a product, whose parts of a gradient are written where they belong
    product_function  the product as one autograd function, whose gradients can be differentiated in turn

The product:

    decomposition   which terms, over which slots, with which part of the weights
    traced_product  all of it as one operator, which torch.compile takes apart
    product         `tensor_product`: checks and broadcasting around a decomposition
    layers          `TensorProduct` and `FullyConnectedTensorProduct`
    from_e3nn       e3nn's products in a model, replaced
"""

from .product import tensor_product

__all__ = ["tensor_product"]
