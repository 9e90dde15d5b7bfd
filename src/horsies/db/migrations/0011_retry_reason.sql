-- The rule by which a failed attempt was or was not retried, as a sentence for operators: a code or an exception
-- class of the policy, RetryLater, or the reason why none applied. NULL for successes, and for tasks without a
-- retry policy.
ALTER TABLE horsies_task_attempts ADD COLUMN retry_reason text;
