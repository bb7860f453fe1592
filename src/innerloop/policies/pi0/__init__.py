"""pi0: state as one token of the suffix, time mixed into the action tokens (openpi; LeRobot lerobot.policies.pi0)."""
