"""Numbering of the sites where an adapter may act. Torch-free: the converter uses it too."""

from loraplane_core.artifact.layout import MODULES, Site

#: Linears that read the same input. Their A matrices lie next to each other in an image, so that one
#: shrink serves the group.
GROUPS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)
SITES_PER_LAYER = len(MODULES)


def site_index(site: Site) -> int:
    """The site's column in the device table."""
    return site.layer * SITES_PER_LAYER + MODULES.index(site.module)


def group_sites(layer: int, group: int) -> tuple[int, ...]:
    """The columns of a group's members, in the order in which their A matrices are stacked."""
    return tuple(site_index(Site(layer, module)) for module in GROUPS[group])
