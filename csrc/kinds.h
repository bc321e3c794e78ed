// The activations: the one list, of which the enumeration, the names and the formulas are made.
//
// An entry is KIND(name in C++, name in Python, formula). A formula is an F of z and alpha, in the words of the vector
// vocabulary (vec_portable.h) and of epilogue.h.
#pragma once

#define MOESTRO_KINDS(KIND)                                     \
    KIND(silu, "silu", sigmoid(set1(alpha) * z) * z)            \
    KIND(gelu, "gelu", gelu(z))                                 \
    KIND(gelu_tanh, "gelu-tanh", gelu_tanh(z))                  \
    KIND(relu, "relu", at_least(z, 0.0f))                       \
    KIND(relu2, "relu2", at_least(z, 0.0f) * at_least(z, 0.0f)) \
    KIND(sigmoid, "sigmoid", sigmoid(z))                        \
    KIND(tanh, "tanh", tanh(z))                                 \
    KIND(identity, "identity", z)
