"""The objects people write (design §5): BaseModelPool, LoRAAdapter and the CLI's Tenant document.

These models are the source of `crds/`: descriptions, defaults, bounds and CEL rules are generated from
them, and one table of good and bad objects runs against both.
"""
