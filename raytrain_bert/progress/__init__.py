"""What a run says while it goes: events from the workers, the board that carries them, the screen."""
