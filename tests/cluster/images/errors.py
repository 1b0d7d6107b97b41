"""Why there is no image."""


class ImageError(Exception):
    """The text is for the person who builds."""
