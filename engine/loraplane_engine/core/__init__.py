"""The core process: owns the model, the arena, the tiers above disk and the scheduler."""
