"""CPU kernels: C++ sources with a plain C ABI, and the binding that loads them."""
