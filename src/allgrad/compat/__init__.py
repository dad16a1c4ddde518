"""Drop-in modules: other libraries' names and signatures, over allgrad's exact gradients."""
