"""What the tool refuses or fails with; the text tells a person what to do."""


class ClusterError(Exception):
    pass
