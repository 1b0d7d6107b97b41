"""The local supervisor: starts and watches every Loraplane process of one machine (design §8)."""
