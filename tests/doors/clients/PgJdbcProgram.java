import java.io.StringReader;
import java.io.StringWriter;
import java.math.BigDecimal;
import java.sql.BatchUpdateException;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Savepoint;
import java.sql.Statement;
import java.time.LocalDate;
import java.time.LocalDateTime;
import java.time.OffsetDateTime;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashSet;
import java.util.List;
import java.util.Objects;
import java.util.Set;
import org.postgresql.PGConnection;
import org.postgresql.util.PSQLException;

/** What pgjdbc can do: {@code PgJdbcProgram HOST:PORT} tells it, as client_probe.py has it. */
public class PgJdbcProgram {
  private static final String PLAIN = "SELECT * FROM kinds ORDER BY id";
  private static String url;

  /** One thing that is tried on a connection of its own. */
  private interface Attempt {
    void run(Connection db) throws Exception;
  }

  public static void main(String[] arguments) throws Exception {
    url = "jdbc:postgresql://" + arguments[0] + "/penstock?user=tester";
    try (Connection db = DriverManager.getConnection(url)) {
      tell("client", "pgjdbc", db.getMetaData().getDriverVersion().split(" ")[0]);
    }
    tries("connect", "", db -> check(db.getMetaData().getDatabaseMajorVersion(), 15));
    tries("reflection", "", PgJdbcProgram::reflection);
    tries("text", "&binaryTransfer=false", PgJdbcProgram::types);
    tries("binary", "&binaryTransfer=true&prepareThreshold=-1", PgJdbcProgram::types);
    tries("nulls", "", PgJdbcProgram::nulls);
    tries("parameters", "", PgJdbcProgram::parameters);
    tries("prepared", "", PgJdbcProgram::prepared);
    tries("batch", "", PgJdbcProgram::batch);
    tries("transaction", "", PgJdbcProgram::transaction);
    tries("savepoint", "", PgJdbcProgram::savepoint);
    tries("fetching", "", PgJdbcProgram::fetching);
    tries("copy_in", "", PgJdbcProgram::copyIn);
    tries("copy_out", "", PgJdbcProgram::copyOut);
    tries("cancel", "", PgJdbcProgram::cancel);
    tries("error", "", PgJdbcProgram::error);
    tries("view", "", PgJdbcProgram::view);
    tries("fresh", "", PgJdbcProgram::fresh);
    tries("subscribe", "", PgJdbcProgram::subscribe);
    tries("large", "", PgJdbcProgram::large);
  }

  private static void reflection(Connection db) throws Exception {
    Set<String> tables = new HashSet<>();
    try (ResultSet found =
        db.getMetaData()
            .getTables(null, "public", "%", new String[] {"TABLE", "MATERIALIZED VIEW"})) {
      while (found.next()) {
        tables.add(found.getString("TABLE_TYPE") + " " + found.getString("TABLE_NAME"));
      }
    }
    check(tables.containsAll(Set.of("TABLE kinds", "TABLE orders", "TABLE many")), true);
    check(tables.contains("MATERIALIZED VIEW spent"), true);
    ResultSet columns = db.getMetaData().getColumns(null, "public", "orders", "%");
    check(strings(columns, "COLUMN_NAME"), List.of("id", "customer", "amount"));
    ResultSet keys = db.getMetaData().getPrimaryKeys(null, "public", "orders");
    check(strings(keys, "COLUMN_NAME"), List.of("id"));
    ResultSet indexes = db.getMetaData().getIndexInfo(null, "public", "orders", false, true);
    check(strings(indexes, "INDEX_NAME").contains("by_customer"), true);
    check(strings(db.getMetaData().getSchemas(), "TABLE_SCHEM").contains("public"), true);
  }

  private static void types(Connection db) throws Exception {
    try (PreparedStatement statement = db.prepareStatement(PLAIN);
        ResultSet row = statement.executeQuery()) {
      int count = 0;
      while (row.next()) {
        long n = row.getLong("id");
        check(n, (long) count);
        count++;
        if (n % 10 != 9) {
          checkRow(row, n);
        }
      }
      check(count, 10_000);
    }
  }

  private static void checkRow(ResultSet row, long n) throws Exception {
    check(row.getBoolean("flag"), n % 2 == 1);
    check(row.getShort("tiny"), (short) (n % 100));
    check(row.getShort("small"), (short) (n % 30_000));
    check(row.getInt("whole"), (int) (-3 * n));
    check(row.getLong("large"), n * 1_000_000_000_000L);
    check(row.getFloat("single"), n + 0.5f);
    check(row.getDouble("twice"), n / 8.0);
    check(row.getBigDecimal("amount"), BigDecimal.valueOf(n).add(new BigDecimal("0.125")));
    check(row.getString("word"), "text " + n + " ü, 'quoted'");
    check(row.getString("short"), "s" + n % 1000);
    check(row.getString("fixed"), String.format("%-6s", "c" + n % 100));
    check(Arrays.toString(row.getBytes("raw")), Arrays.toString(new byte[] {(byte) n, 0, -1}));
    check(row.getObject("day", LocalDate.class), LocalDate.of(2000, 1, 1).plusDays(n));
    OffsetDateTime moment = OffsetDateTime.parse("2026-01-01T00:00:00.000001Z").plusSeconds(n);
    check(row.getObject("moment", OffsetDateTime.class).toInstant(), moment.toInstant());
    check(row.getObject("clock", LocalDateTime.class), moment.toLocalDateTime());
    Object[] list = (Object[]) row.getArray("list").getArray();
    check(Arrays.asList(list), Arrays.asList((int) n, null, (int) n + 1));
    check(Arrays.asList((Object[]) row.getArray("words").getArray()), List.of("a", "b\"c"));
    check(row.getString("pairs"), "{\"k\":" + n + "}");
    check(row.getString("both"), "{\"a\":" + n + ",\"b\":0.5}");
  }

  private static void nulls(Connection db) throws Exception {
    try (Statement statement = db.createStatement();
        ResultSet row = statement.executeQuery("SELECT * FROM kinds WHERE flag IS NULL")) {
      int count = 0;
      while (row.next()) {
        count++;
        for (int column = 2; column <= row.getMetaData().getColumnCount(); column++) {
          check(row.getObject(column), null);
        }
      }
      check(count, 1_000);
    }
    run(db, "CREATE TABLE blanks (a int, b text, c timestamptz)");
    try (PreparedStatement put = db.prepareStatement("INSERT INTO blanks VALUES (?, ?, ?)")) {
      put.setNull(1, java.sql.Types.INTEGER);
      put.setString(2, null);
      put.setObject(3, null);
      check(put.executeUpdate(), 1);
    }
    check(one(db, "SELECT count(*) FROM blanks WHERE a IS NULL AND c IS NULL"), 1L);
  }

  private static void parameters(Connection db) throws Exception {
    OffsetDateTime moment = OffsetDateTime.parse("2026-01-01T00:00:17.000001Z");
    Object[][] values = {
      {"flag", true}, {"small", 17}, {"large", 17_000_000_000_000L}, {"twice", 2.125},
      {"amount", new BigDecimal("17.125")}, {"word", "text 17 ü, 'quoted'"},
      {"day", LocalDate.of(2000, 1, 18)},
    };
    for (Object[] each : values) {
      String text = "SELECT id FROM kinds WHERE " + each[0] + " = ? AND id = ?";
      try (PreparedStatement statement = db.prepareStatement(text)) {
        check(statement.getParameterMetaData().getParameterTypeName(2), "int8");
        statement.setObject(1, each[1]);
        statement.setInt(2, 17);
        check(strings(statement.executeQuery(), "id"), List.of("17"));
      }
    }
    run(db, "CREATE TABLE given (raw bytea, moment timestamptz, clock timestamp)");
    try (PreparedStatement put = db.prepareStatement("INSERT INTO given VALUES (?, ?, ?)")) {
      put.setBytes(1, new byte[] {17, 0, -1});
      put.setObject(2, moment);
      put.setObject(3, moment.toLocalDateTime());
      check(put.executeUpdate(), 1);
    }
    try (Statement statement = db.createStatement()) {
      ResultSet row = statement.executeQuery("SELECT * FROM given");
      check(row.next(), true);
      check(Arrays.toString(row.getBytes("raw")), Arrays.toString(new byte[] {17, 0, -1}));
      check(row.getObject("moment", OffsetDateTime.class).toInstant(), moment.toInstant());
      check(row.getObject("clock", LocalDateTime.class), moment.toLocalDateTime());
    }
  }

  private static void prepared(Connection db) throws Exception {
    String text = "SELECT id FROM orders WHERE id = ?";
    try (PreparedStatement statement = db.prepareStatement(text)) {
      for (int number = 0; number < 200; number++) {
        statement.setLong(1, number);
        check(strings(statement.executeQuery(), "id"), List.of("" + number));
      }
    }
  }

  private static void batch(Connection db) throws Exception {
    run(db, "CREATE TABLE batches (id bigint PRIMARY KEY, word text)");
    try (PreparedStatement put = db.prepareStatement("INSERT INTO batches VALUES (?, ?)")) {
      for (int number = 0; number < 500; number++) {
        put.setLong(1, number);
        put.setString(2, "w" + number);
        put.addBatch();
      }
      check(put.executeBatch().length, 500);
      put.setLong(1, 7);
      put.setString(2, "again");
      put.addBatch();
      put.executeBatch();
      throw new AssertionError("a present key was inserted");
    } catch (BatchUpdateException failed) {
      check(failed.getSQLState(), "23505");
    }
    check(one(db, "SELECT count(*) FROM batches"), 500L);
  }

  private static void transaction(Connection db) throws Exception {
    run(db, "CREATE TABLE accounts (id bigint PRIMARY KEY, n bigint)");
    db.setAutoCommit(false);
    run(db, "INSERT INTO accounts VALUES (1, 1)");
    db.commit();
    run(db, "UPDATE accounts SET n = 10 WHERE id = 1");
    db.rollback();
    check(one(db, "SELECT n FROM accounts"), 1L);
    db.commit();
    db.setReadOnly(true);
    check(one(db, "SELECT n FROM accounts"), 1L);
    db.commit();
  }

  private static void savepoint(Connection db) throws Exception {
    run(db, "CREATE TABLE saved (id bigint PRIMARY KEY)");
    db.setAutoCommit(false);
    run(db, "INSERT INTO saved VALUES (1)");
    Savepoint here = db.setSavepoint("here");
    try {
      run(db, "INSERT INTO saved VALUES (1)");
      throw new AssertionError("a present key was inserted");
    } catch (SQLException failed) {
      db.rollback(here);
    }
    run(db, "INSERT INTO saved VALUES (3)");
    db.commit();
    try (Statement statement = db.createStatement()) {
      ResultSet found = statement.executeQuery("SELECT id FROM saved ORDER BY id");
      check(strings(found, "id"), List.of("1", "3"));
    }
  }

  private static void fetching(Connection db) throws Exception {
    db.setAutoCommit(false);
    try (Statement statement = db.createStatement()) {
      statement.setFetchSize(500);
      try (ResultSet row = statement.executeQuery("SELECT id FROM many ORDER BY id")) {
        for (long number = 0; number < 5_000; number++) {
          check(row.next(), true);
          check(row.getLong(1), number);
        }
      }
    }
    db.commit();
  }

  private static void copyIn(Connection db) throws Exception {
    run(db, "CREATE TABLE copied (id bigint, word text)");
    StringBuilder rows = new StringBuilder("id,word\n");
    for (int number = 0; number < 2_000; number++) {
      rows.append(number).append(",\"a,").append(number).append("\"\n");
    }
    String text = "COPY copied FROM STDIN WITH (FORMAT csv, HEADER)";
    PGConnection own = db.unwrap(PGConnection.class);
    check(own.getCopyAPI().copyIn(text, new StringReader(rows.toString())), 2_000L);
    check(one(db, "SELECT count(*) FROM copied WHERE word = 'a,7'"), 1L);
  }

  private static void copyOut(Connection db) throws Exception {
    StringWriter out = new StringWriter();
    String text = "COPY (SELECT id FROM orders) TO STDOUT";
    check(db.unwrap(PGConnection.class).getCopyAPI().copyOut(text, out), 1_000L);
    check(out.toString().lines().count(), 1_000L);
  }

  private static void cancel(Connection db) throws Exception {
    List<SQLException> caught = new ArrayList<>();
    try (Statement statement = db.createStatement()) {
      Thread following =
          new Thread(
              () -> {
                try {
                  statement.executeQuery("SUBSCRIBE orders");
                } catch (SQLException failed) {
                  caught.add(failed);
                }
              });
      following.start();
      // pgjdbc sends one request for each statement: one that overtakes its statement is lost.
      String running = "SELECT count(*) FROM pg_stat_activity WHERE query = 'SUBSCRIBE orders'";
      try (Connection other = DriverManager.getConnection(url)) {
        while (following.isAlive() && one(other, running) == 0) {
          Thread.onSpinWait();
        }
      }
      statement.cancel();
      following.join();
    }
    check(caught.get(0).getSQLState(), "57014");
    check(one(db, "SELECT count(*) FROM orders"), 1_000L);
  }

  private static void error(Connection db) throws Exception {
    try {
      run(db, "CREATE TABLE x (a int,)");
      throw new AssertionError("a wrong statement was taken");
    } catch (PSQLException failed) {
      check(failed.getSQLState(), "42601");
      check(failed.getServerErrorMessage().getPosition(), 23);
    }
    try {
      run(db, "INSERT INTO orders VALUES (1, 'again', 0)");
      throw new AssertionError("a present key was inserted");
    } catch (SQLException failed) {
      check(failed.getSQLState(), "23505");
    }
  }

  private static void view(Connection db) throws Exception {
    run(db, "CREATE TABLE words (word text)");
    run(
        db,
        "CREATE MATERIALIZED VIEW lengths AS SELECT word, count(*) AS n FROM words GROUP BY word");
    check(one(db, "SELECT n FROM spent WHERE customer = 'customer 3'"), 100L);
  }

  private static void fresh(Connection db) throws Exception {
    for (long number = 1; number < 6; number++) {
      run(db, "INSERT INTO words VALUES ('one')");
      check(one(db, "SELECT n FROM lengths WHERE word = 'one'"), number);
    }
  }

  private static void subscribe(Connection db) throws Exception {
    db.setAutoCommit(false);
    run(db, "DECLARE changes CURSOR FOR SUBSCRIBE lengths");
    try (Statement statement = db.createStatement();
        ResultSet row = statement.executeQuery("FETCH 10 changes")) {
      check(row.next(), true);
      check(row.getInt("__diff"), 1);
      check(row.getString("word"), "one");
      check(row.getLong("n"), 5L);
    }
    db.rollback();
  }

  private static void large(Connection db) throws Exception {
    long sum = 0;
    try (Statement statement = db.createStatement();
        ResultSet row = statement.executeQuery("SELECT * FROM many")) {
      while (row.next()) {
        sum += row.getLong(1);
      }
    }
    check(sum, 200_000L * 199_999 / 2);
  }

  private static void tries(String key, String settings, Attempt attempt) {
    try (Connection db = DriverManager.getConnection(url + settings)) {
      attempt.run(db);
      tell("yes", key);
    } catch (Exception | AssertionError failed) {
      System.err.println("-- " + key);
      failed.printStackTrace();
      String text = String.valueOf(failed.getMessage()).split("\n")[0].replace("\t", " ");
      String reason = failed.getClass().getSimpleName() + ": " + text;
      tell("no", key, reason.substring(0, Math.min(200, reason.length())));
    }
  }

  private static void tell(String... parts) {
    System.out.println(String.join("\t", parts));
  }

  private static void run(Connection db, String text) throws SQLException {
    try (Statement statement = db.createStatement()) {
      statement.execute(text);
    }
  }

  private static long one(Connection db, String text) throws SQLException {
    try (Statement statement = db.createStatement();
        ResultSet row = statement.executeQuery(text)) {
      row.next();
      return row.getLong(1);
    }
  }

  private static List<String> strings(ResultSet found, String column) throws SQLException {
    List<String> values = new ArrayList<>();
    try (found) {
      while (found.next()) {
        values.add(found.getString(column));
      }
    }
    return values;
  }

  private static void check(Object found, Object wanted) {
    if (!Objects.equals(found, wanted)) {
      throw new AssertionError("found " + found + " and not " + wanted);
    }
  }
}
