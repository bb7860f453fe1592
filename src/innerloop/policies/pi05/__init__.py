"""pi0.5: state written into the prompt, time through modulated norms (openpi; LeRobot lerobot.policies.pi05)."""
