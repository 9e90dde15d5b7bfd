"""The applications under test, by subject; see the docstrings of the modules.

Workers and their tasks
    programs        a task for everything a task can do: the default of `Fleet`
    flows           workflows of these tasks
    inside          tasks that read their own id, report progress and end early
    coroutines      `async def` tasks for async children
    bursts, lanes   very short tasks, in one queue and in five
    capped, queued, teams   caps, queues of every kind, queues of different workers
    hooks           start and stop hooks that fail if the environment says so
    releases        two releases of one application
    traced          OpenTelemetry spans, written to a file
    talking         tasks that log
    hungry          tasks with memory limits
    hostile, hostile_tasks   tasks that attack their own process

Schedulers
    scheduled, many_schedules   tasks and workflows with schedules

Children without a database
    pool_app, pool_programs, pool_parent   what a pool's children load, execute and belong to
    workflow_app    tasks that take the results of other nodes
    shop            the tasks from which the specification tests make nodes

Imports
    broken_tasks, failing_module, noisy_import   modules that fail or print when they are imported

Producers and servers
    fork_program, fork_close_program, fork_threads_program   producers that fork
    skewed_producer   a producer with a wrong clock
    live_site, django_site   a dashboard of one page; a Django project
"""
