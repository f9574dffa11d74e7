-- A store's weeks compared with the following year, by day of the week.
with weekly as (
  select
    d_week_seq, ss_store_sk,
    sum(case when d_day_name = 'Sunday' then ss_sales_price end) as sun,
    sum(case when d_day_name = 'Monday' then ss_sales_price end) as mon,
    sum(case when d_day_name = 'Tuesday' then ss_sales_price end) as tue,
    sum(case when d_day_name = 'Wednesday' then ss_sales_price end) as wed,
    sum(case when d_day_name = 'Thursday' then ss_sales_price end) as thu,
    sum(case when d_day_name = 'Friday' then ss_sales_price end) as fri,
    sum(case when d_day_name = 'Saturday' then ss_sales_price end) as sat
  from store_sales
  join date_dim on d_date_sk = ss_sold_date_sk
  group by d_week_seq, ss_store_sk
),
named as (
  select s_store_name as name, s_store_id as id, d_month_seq as month_seq, weekly.*
  from weekly
  join store on s_store_sk = ss_store_sk
  join date_dim on date_dim.d_week_seq = weekly.d_week_seq
)
select
  a.name, a.id, a.d_week_seq,
  a.sun / b.sun as sun_ratio, a.mon / b.mon as mon_ratio, a.tue / b.tue as tue_ratio,
  a.wed / b.wed as wed_ratio, a.thu / b.thu as thu_ratio, a.fri / b.fri as fri_ratio,
  a.sat / b.sat as sat_ratio
from named as a
join named as b on b.id = a.id and a.d_week_seq = b.d_week_seq - 52
where a.month_seq between 1212 and 1212 + 11
  and b.month_seq between 1212 + 12 and 1212 + 23
order by
  a.name, a.id, a.d_week_seq, sun_ratio, mon_ratio, tue_ratio, wed_ratio, thu_ratio, fri_ratio,
  sat_ratio
limit 100
