//! The application's endpoints, as `docs/port.md` ports them: one for each of the six sync types, and one for the groomer.
//!
//! ```sh
//! DATABASE_URL=postgresql://… cargo run --example server -- --listen 127.0.0.1:8080
//! curl -X POST '127.0.0.1:8080/sync?automation=true'
//! ```
//!
//! 200 with what was done, 409 where the key is held, 500 where the job failed, 503 where the database could not be asked.
//! The work is only acted: `?takes_ms=500` takes a while, `?fails=true` fails, `?panics=true` panics.

use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Json, Router};
use clap::Parser;
use serde::Deserialize;
use serde_json::{Value, json};
use sync_lock::{Job, Lease, LockKey, RunOutcome, RunReport, Settings, SyncLock, SyncType};
use tokio::signal::unix::{SignalKind, signal};

/// Serve the application's endpoints
#[derive(Parser)]
struct Arguments {
    /// Where to listen; port 0 takes a free one and prints it
    #[arg(long, default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
}

/// What a request asks for.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
struct Request {
    /// The opt-in automation pass of the scheduled sync.
    automation: bool,
    takes_ms: u64,
    fails: bool,
    panics: bool,
}

type Answer = (StatusCode, Json<Value>);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let locks = SyncLock::new(&Settings::from_env()?)?;
    let mut app = Router::new().route("/sync", post(scheduled)).route("/groomer", post(groomer));
    for (path, sync_type) in [
        ("/sync/manual", SyncType::Manual),
        ("/automation", SyncType::Automation),
        ("/pr-followup", SyncType::PrFollowup),
        ("/reconcile", SyncType::Reconcile),
        ("/stale-work", SyncType::StaleWork),
    ] {
        let endpoint = move |locks, request| run(locks, sync_type.into(), request);
        app = app.route(path, post(endpoint));
    }
    let listener = tokio::net::TcpListener::bind(arguments.listen).await?;
    println!("listening on {}", listener.local_addr()?);

    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut hang_up = signal(SignalKind::hangup())?;
    let told = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = hang_up.recv() => {}
        }
    };
    let stopping = locks.clone();
    let server = axum::serve(listener, app.with_state(locks)).with_graceful_shutdown(async move {
        told.await;
        // Jobs are told to stop and their rows are freed, so that their requests end too.
        stopping.shutdown().await;
    });
    server.await?;
    println!("stopped");
    Ok(())
}

/// Any endpoint but that of the scheduled sync.
async fn run(State(locks): State<SyncLock>, job: Job, Query(request): Query<Request>) -> Answer {
    // A task of its own: a caller that hangs up does not cancel the job.
    let run = tokio::spawn(async move { locks.run(job, move |lease| work(lease, request)).await });
    answer(run.await, |report| json!({ "reposFetched": report.repos_fetched, "syncedCount": report.synced_count }))
}

/// The groomer: no run record, and a heartbeat that every lease has anyway.
async fn groomer(locks: State<SyncLock>, request: Query<Request>) -> Answer {
    run(locks, LockKey::GROOMER.into(), request).await
}

/// The scheduled sync, and inside of it the automation pass if it was asked for.
async fn scheduled(State(locks): State<SyncLock>, Query(request): Query<Request>) -> Answer {
    let pass = request.automation.then_some(|lease| work(lease, Request::default()));
    let run = tokio::spawn(async move {
        let (outcome, report) = locks.run_scheduled(move |lease| work(lease, request), pass).await;
        (outcome, json!(report))
    });
    match run.await {
        Ok((outcome, report)) => answer(Ok(outcome), |_| report),
        Err(error) => answer(Err(error), |_| Value::Null),
    }
}

/// The statuses and bodies that the scheduler knows.
fn answer(
    outcome: Result<RunOutcome<String>, tokio::task::JoinError>,
    done: impl FnOnce(&RunReport) -> Value,
) -> Answer {
    let (status, body) = match outcome {
        Ok(RunOutcome::Completed(report)) => (StatusCode::OK, done(&report)),
        Ok(RunOutcome::Held { .. } | RunOutcome::StillRunning) => {
            (StatusCode::CONFLICT, json!({ "error": "sync already running" }))
        }
        Ok(RunOutcome::Failed(failure)) => (StatusCode::INTERNAL_SERVER_ERROR, json!({ "error": failure.to_string() })),
        Ok(RunOutcome::Lost(loss)) => (StatusCode::INTERNAL_SERVER_ERROR, json!({ "error": loss.to_string() })),
        Ok(RunOutcome::Unavailable(error)) => (StatusCode::SERVICE_UNAVAILABLE, json!({ "error": error.to_string() })),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, json!({ "error": error.to_string() })),
    };
    (status, Json(body))
}

async fn work(lease: Arc<Lease>, request: Request) -> Result<RunReport, String> {
    println!("working on {}", lease.key());
    tokio::time::sleep(Duration::from_millis(request.takes_ms)).await;
    assert!(!request.panics, "the job was asked to panic");
    if request.fails {
        return Err("the issue tracker does not answer".to_owned());
    }
    Ok(RunReport { repos_fetched: 2, synced_count: 7, notes: None })
}
